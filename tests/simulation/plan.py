"""The plan of one history: its processes, requests and accident rates, derived from the seed.

A plan is plain data. A failing history is reduced by changing its plan (`tests.simulation.shrink`); `--set`
changes a plan by hand.
"""

import random
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from conductor.core.replicas import Policy
from tests.simulation.models import LAYOUTS

POLICIES: Final[tuple[Policy, ...]] = ("fsfs", "rr", "random", "cache_aware")

RATES: Final[dict[str, float]] = {
    "worker dies": 0.015,
    "worker freezes": 0.008,
    "worker hangs": 0.005,
    "worker leaves": 0.006,
    "worker is cut off": 0.006,
    "worker is replaced": 0.005,
    "worker is given up": 0.006,
    "conductor dies": 0.01,
    "conductor freezes": 0.006,
    "conductor is cut off": 0.005,
    "conductor claims": 0.005,
    "deadline is early": 0.004,
    "gateway dies": 0.008,
    "gateway freezes": 0.004,
    "gateway is cut off": 0.004,
    "client loses its line": 0.012,
    "client reads nothing": 0.006,
    "client cancels": 0.004,
    "client leaves": 0.003,
    "client asks again": 0.004,
    "stranger takes an id": 0.004,
    "stranger writes nonsense": 0.004,
    "log restarts": 0.005,
    "log is full": 0.003,
    "log is slow": 0.003,
    "log's clock goes back": 0.003,
    "log loses its tail": 0.0025,
    "log is made anew": 0.0012,
    "tensor is lost": 0.01,
    "snapshot is lost": 0.004,
    "checkpoint is replaced": 0.004,
}
"""Every accident, and how often it happens, in each step of a history that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may happen in one history.

    Attributes:
        layout: the model and its ranks (`tests.simulation.models.LAYOUTS`).
        services: the number of requests that services publish to the log directly.
        poisons: the number of requests that kill their worker each time they reach a certain walk.
        limited: the number of requests with a time limit.
        places: the number of requests that may run at a time; `waiting`, that may wait; None is
            unlimited.
        replicas: the policy to choose a replica; `per_replica`, the number of requests it may have.
        rates: the probability of each accident in one step; unnamed ones do not happen.
        p_lost: the probability that a message to the log is lost; `p_ack_lost`, that its ack is.
        p_other: the probability that media computed again differ.
        busy_steps: the number of steps with accidents.
        rest_steps: the number of steps without accidents within which the simulation must come to rest.
    """

    layout: str = "decoder"
    requests: int = 4
    services: int = 1
    poisons: int = 0
    limited: int = 0
    gateways: int = 2
    conductors: int = 2
    places: int = 4
    waiting: int | None = None
    replicas: Policy = "fsfs"
    per_replica: int | None = None
    max_attempts: int = 2
    rates: dict[str, float] = field(default_factory=dict)
    p_lost: float = 0.0
    p_ack_lost: float = 0.0
    p_other: float = 0.0
    busy_steps: int = 300
    rest_steps: int = 100_000

    @staticmethod
    def of(seed: int) -> "Plan":
        """The plan of a seed: quiet and wild ones, busy and idle ones, in every layout."""
        chance = random.Random(f"plan {seed}")
        share = chance.choice([0.0, 0.15, 0.4, 0.7])
        strength = chance.choice([0.5, 1.0, 2.0])
        requests = chance.randint(1, 6)
        # With a source of its own, so that the plans of known seeds stay as they were.
        is_replaced = random.Random(f"checkpoint {seed}").random() < share / 2
        return Plan(
            layout=chance.choice(sorted(LAYOUTS)),
            requests=requests,
            services=chance.choice([0, 0, 1, 2]),
            poisons=chance.choice([0, 0, 0, 1, 1, 2, requests]),
            limited=chance.choice([0, 0, 1, 2]),
            gateways=chance.randint(1, 3),
            conductors=chance.randint(1, 3),
            places=chance.randint(1, 6),
            waiting=chance.choice([None, None, None, None, 1]),
            replicas=chance.choice(POLICIES),
            per_replica=chance.choice([None, None, 1, 2]),
            max_attempts=chance.choice([1, 2, 2, 3]),
            rates={
                name: rate * strength
                for name, rate in RATES.items()
                if (is_replaced if name == "checkpoint is replaced" else chance.random() < share)
            },
            p_lost=chance.choice([0.0, 0.0, 0.05, 0.2]),
            p_ack_lost=chance.choice([0.0, 0.0, 0.05, 0.2]),
            p_other=chance.choice([0.0, 0.0, 0.0, 0.3]),
            busy_steps=chance.choice([150, 300, 600]),
        )

    def changed(self, changes: dict[str, Any]) -> "Plan":
        """The plan with some fields changed; `rates` names all accidents that happen.

        Raises:
            ValueError: a plan has no such field.
        """
        known = {one.name for one in fields(self)}
        if unknown := sorted(changes.keys() - known):
            raise ValueError(f"a plan has no {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
        if strange := sorted(changes.get("rates", {}).keys() - RATES.keys()):
            raise ValueError(f"there is no accident {strange[0]!r}; expected some of {', '.join(RATES)}")
        return replace(self, **changes)

    def difference(self, other: "Plan") -> dict[str, Any]:
        """The fields that differ from `other`."""
        mine, others = asdict(self), asdict(other)
        return {name: value for name, value in mine.items() if value != others[name]}
