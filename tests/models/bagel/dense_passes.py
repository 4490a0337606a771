"""A naive engine for BAGEL's drivers: no pool, no cells. Each pass computes all that it sees again, at once.

All tokens that a pass depends on are one sequence under a dense mask: the committed tokens of its context,
with what each of them saw, and its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from models.bagel.llm import BagelLM
from models.programs import Going, Mask, Pass, Turn


@dataclass
class _Context:
    """Committed tokens: embeddings, positions, routes; and for each the number of tokens that it sees."""

    embeds: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    routes: list[int] = field(default_factory=list)
    sees: list[int] = field(default_factory=list)

    def first(self, count: int) -> "_Context":
        return _Context(self.embeds[:count], self.positions[:count], self.routes[:count], self.sees[:count])


class DensePasses:
    """Computes the passes of one driver; `asked` are all of them, by round."""

    def __init__(self, node: BagelLM) -> None:
        self._node = node
        self._contexts: dict[str, _Context] = {}
        self.asked: list[list[Pass]] = []

    @property
    def contexts(self) -> Mapping[str, int]:
        """The committed tokens of each context."""
        return {name: len(one.embeds) for name, one in self._contexts.items()}

    @torch.inference_mode()
    def results(self, passes: Sequence[Pass]) -> list[torch.Tensor]:
        """The hidden states of one round."""
        self.asked.append(list(passes))
        for one in passes:
            if one.context not in self._contexts:
                origin = self._contexts[one.forks] if one.forks else _Context()
                self._contexts[one.context] = origin.first(len(origin.embeds))
        return [self._result(one) for one in passes]

    def run(self, driver: Any) -> Mapping[str, torch.Tensor] | Turn:
        """Run a driver to its next outputs."""
        while True:
            found: Mapping[str, torch.Tensor] | Turn | Going | None
            found = driver.take(self.results(driver.passes()))
            if found is not None and not isinstance(found, Going):
                return found

    def _result(self, asked: Pass) -> torch.Tensor:
        context = self._contexts[asked.context]
        if asked.after is not None:
            assert asked.after <= len(context.embeds)
            context = self._contexts[asked.context] = context.first(asked.after)
        before, count = len(context.embeds), asked.tokens
        following = max(context.positions, default=-1) + 1
        given = asked.positions
        positions = [given] * count if isinstance(given, int) else list(range(following, following + count))
        assert given is None or isinstance(given, int)
        full = asked.mask is Mask.FULL
        all_of = _Context(
            context.embeds + list(self._embeds(asked)),
            context.positions + positions,
            context.routes + ([0] * count if asked.routes is None else asked.routes.tolist()),
            context.sees + [before + count if full else before + n + 1 for n in range(count)],
        )
        if asked.commits:
            self._contexts[asked.context] = all_of
        return self._compute(all_of)[before:]

    def _embeds(self, asked: Pass) -> torch.Tensor:
        if asked.embeds is not None:
            return asked.embeds
        found: torch.Tensor = self._node.text_model.embed_tokens(torch.tensor(asked.ids))
        return found

    def _compute(self, tokens: _Context) -> torch.Tensor:
        places, sees = torch.arange(len(tokens.embeds)), torch.tensor(tokens.sees)
        visible = places[None] < sees[:, None]
        output = self._node.text_model(
            inputs_embeds=torch.stack(tokens.embeds)[None],
            position_ids=torch.tensor([tokens.positions]),
            attention_mask=torch.zeros(()).where(visible, float("-inf"))[None, None],
            routes=torch.tensor(tokens.routes, dtype=torch.int8),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
