"""The requests of a history, and the poison pills among them: a function of seed and plan."""

import random
from dataclasses import dataclass
from typing import Final

from shared.events import Inputs, Params, RequestSubmitted
from tests.simulation.models import LAYOUTS, TOKENS, Model
from tests.simulation.plan import Plan

FURTHER: Final = 2
"""So many tokens further is progress; real workers wait for some more."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A request that kills its worker: in which walk, and after how many tokens of an attempt."""

    walk: str
    after: int

    @property
    def is_proven_first(self) -> bool:
        """True if it makes enough progress each time to count as proven."""
        return self.after >= FURTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request; `poison` is set if it kills its worker."""

    request_id: str
    kind: str
    timeout_s: float | None = None
    priority: int = 0
    tenant: str | None = None
    poison: Poison | None = None

    def submission(self, event_id: str, origin: str) -> RequestSubmitted:
        """The request as an event."""
        return RequestSubmitted(
            id=event_id,
            writer=origin,
            request_id=self.request_id,
            model="demo",
            inputs=Inputs(text=self.kind),
            params=Params(max_tokens=TOKENS),
            origin=origin,
            timeout_s=self.timeout_s,
            priority=self.priority,
            tenant=self.tenant,
        )


def asked(seed: int, plan: Plan) -> list[Question]:
    """All requests of a history."""
    chance, model = random.Random(f"questions {seed}"), LAYOUTS[plan.layout].model
    numbers = range(plan.requests)
    limited = set(chance.sample(numbers, min(plan.limited, plan.requests)))
    poisons = set(chance.sample(numbers, min(plan.poisons, plan.requests)))
    return [
        Question(
            request_id=f"r{number}",
            kind=(kind := chance.choice(model.kinds)),
            timeout_s=chance.choice([0.2, 1.0, 5.0]) if number in limited else None,
            priority=chance.choice([0, 0, 0, 1, -1]),
            tenant=chance.choice([None, "a", "b"]),
            poison=_poison(model, kind, chance) if number in poisons else None,
        )
        for number in numbers
    ]


def _poison(model: Model, kind: str, chance: random.Random) -> Poison:
    """A poison in a walk that a request of this kind reaches."""
    walk = chance.choice([name for name in model.walks_of(kind) if model.parts[name].does != "fill"])
    after = chance.choice([0, 0, 1, FURTHER + 1]) if model.parts[walk].does == "talk" else 0
    return Poison(walk, after)
