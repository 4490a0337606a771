"""A naive oracle of passes: transformers' model computes all that a pass depends on again, under a mask.

Each computed token keeps its id, its position and the tokens that it saw. A context is a list of tokens. A
token that a context has dropped is computed again as long as others have seen it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from models.programs import Mask, NewTokens, Pass, TokenDriver


@dataclass(eq=False)
class _Token:
    """A computed token; `largest` is the largest position of its pass up to it."""

    id: int
    position: int
    largest: int
    seen: list["_Token"] = field(default_factory=list)


@dataclass
class _Context:
    """The tokens of a context: committed ones, and those of its last pass."""

    tower: str
    committed: list[_Token] = field(default_factory=list)
    last: list[_Token] = field(default_factory=list)


class PassOracle:
    """Computes the passes of one driver.

    Args:
        models: transformers' models, by tower; the name of the node itself is empty.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models
        self._contexts: dict[str, _Context] = {}

    @torch.inference_mode()
    def results(self, passes: list[Pass]) -> list[torch.Tensor]:
        """The results of one round."""
        for one in passes:
            if one.context not in self._contexts:
                forked = self._contexts[one.forks].committed if one.forks else []
                self._contexts[one.context] = _Context(one.tower, [*forked])
        return [self._result(one) for one in passes]

    def _result(self, asked: Pass) -> torch.Tensor:
        context = self._contexts[asked.context]
        assert context.tower == asked.tower
        assert asked.ids is not None
        if asked.after is not None:
            context.committed = [*context.committed, *context.last][: asked.after]
            assert len(context.committed) == asked.after
        following = context.committed[-1].largest + 1 if context.committed else 0
        given = asked.positions.tolist() if isinstance(asked.positions, torch.Tensor) else None
        positions = given or range(following, following + asked.tokens)
        largest = accumulate(positions, max)
        new = [_Token(*one) for one in zip(asked.ids, positions, largest, strict=True)]
        for place, one in enumerate(new):
            one.seen = [*context.committed, *(new if asked.mask is Mask.FULL else new[: place + 1])]
        context.last = new
        if asked.commits:
            context.committed, context.last = [*context.committed, *new], []
        return self._compute(asked, new if asked.logits is None else [new[n] for n in asked.logits])

    def _compute(self, asked: Pass, wanted: list[_Token]) -> torch.Tensor:
        tokens = _all_of(wanted)
        place = {one: place for place, one in enumerate(tokens)}
        visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for own, one in enumerate(tokens):
            visible[own, [place[other] for other in one.seen]] = True
        model = self._models[asked.tower]
        states: torch.Tensor = model.model(
            input_ids=torch.tensor([[one.id for one in tokens]]),
            attention_mask=torch.zeros(()).where(visible, float("-inf"))[None, None],
            position_ids=torch.tensor([[one.position for one in tokens]]),
            use_cache=False,
        ).last_hidden_state[0, [place[one] for one in wanted]]
        return states if asked.logits is None else model.lm_head(states).float()


def _all_of(wanted: list[_Token]) -> list[_Token]:
    """These tokens, and all that they depend on."""
    found = dict.fromkeys(wanted)
    waiting = list(wanted)
    while waiting:
        for one in waiting.pop().seen:
            if one not in found:
                found[one] = None
                waiting.append(one)
    return list(found)


def tokens_by(oracle: PassOracle, driver: TokenDriver, *, ends: Callable[[list[int]], bool]) -> list[int]:
    """The tokens that a driver emits over an oracle, until it or `ends` ends the answer."""
    found: list[int] = []
    while True:
        emitted: NewTokens | None = driver.take(oracle.results(list(driver.passes())))
        found += emitted.ids if emitted is not None else []
        if (emitted is not None and emitted.ended) or ends(found):
            return found
