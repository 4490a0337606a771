"""A naive oracle of passes: one forward of transformers' model over all tokens ever computed, under a mask.

Each computed token keeps its id, its position and the tokens that it saw. A context is a list of them. Tokens
that a context has dropped stay in the forward, for others may have seen them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from models.programs import Mask, NewTokens, Pass, TokenDriver


@dataclass
class _Tokens:
    """The tokens that one model has computed, the oldest first."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)


@dataclass
class _Context:
    """The tokens of a context: committed ones, and those of its last pass."""

    tower: str
    committed: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


class PassOracle:
    """Computes the passes of one driver.

    Args:
        models: transformers' models, by tower; the name of the node itself is empty.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models
        self._tokens = {name: _Tokens() for name in models}
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
        context, tokens = self._contexts[asked.context], self._tokens[asked.tower]
        assert context.tower == asked.tower
        assert asked.ids is not None
        if asked.after is not None:
            context.committed = [*context.committed, *context.last][: asked.after]
            assert len(context.committed) == asked.after
        first, count = len(tokens.ids), asked.tokens
        new = list(range(first, first + count))
        following = max((tokens.positions[one] for one in context.committed), default=-1) + 1
        given = asked.positions if isinstance(asked.positions, torch.Tensor) else None
        tokens.ids += asked.ids
        tokens.positions += given.tolist() if given is not None else range(following, following + count)
        tokens.seen += [
            [*context.committed, *(new if asked.mask is Mask.FULL else new[: place + 1])]
            for place in range(count)
        ]
        context.last = new
        if asked.commits:
            context.committed, context.last = [*context.committed, *new], []
        return self._compute(asked, tokens)[new if asked.logits is None else [new[n] for n in asked.logits]]

    def _compute(self, asked: Pass, tokens: _Tokens) -> torch.Tensor:
        total = len(tokens.ids)
        visible = torch.zeros(total, total, dtype=torch.bool)
        for own, seen in enumerate(tokens.seen):
            visible[own, seen] = True
        model = self._models[asked.tower]
        states: torch.Tensor = model.model(
            input_ids=torch.tensor([tokens.ids]),
            attention_mask=torch.zeros(()).where(visible, float("-inf"))[None, None],
            position_ids=torch.tensor([tokens.positions]),
            use_cache=False,
        ).last_hidden_state[0]
        return states if asked.logits is None else model.lm_head(states).float()


def tokens_by(oracle: PassOracle, driver: TokenDriver, *, ends: Callable[[list[int]], bool]) -> list[int]:
    """The tokens that a driver emits over an oracle, until it or `ends` ends the answer."""
    found: list[int] = []
    while True:
        emitted: NewTokens | None = driver.take(oracle.results(list(driver.passes())))
        found += emitted.ids if emitted is not None else []
        if (emitted is not None and emitted.ended) or ends(found):
            return found
