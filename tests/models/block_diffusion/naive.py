"""Runs a token driver by transformers' own forward and cache, one pass after another: an oracle.

A context is a cache of transformers. A pass crops it to `Pass.after`, and runs over its tokens under an
explicit mask. No kernel, pool or batch of ours.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from transformers import DynamicCache

from models.programs import Mask, NewTokens, Pass, TokenDriver


class NaiveRun:
    """One run of a driver.

    Args:
        models: of transformers, by the name of the tower; the node's own is that of the empty name.
        causal: replace all masks by the causal one, as a negative control.
    """

    def __init__(self, models: Mapping[str, Any], *, causal: bool = False) -> None:
        self._models: Final = models
        self._causal: Final = causal
        self._caches: dict[str, DynamicCache] = {}
        self._committed: dict[str, int] = {}
        self.passes: list[Pass] = []
        self.largest = 0

    @torch.inference_mode()
    def run(self, driver: TokenDriver) -> list[NewTokens]:
        """Run it to its end; return what it emitted."""
        emitted: list[NewTokens] = []
        while not (emitted and emitted[-1].ended):
            asked = list(driver.passes())
            assert len({one.context for one in asked}) == len(asked) > 0
            found = driver.take([self._result(one) for one in asked])
            assert len(self._caches) <= driver.max_contexts
            cells = sum(cache.get_seq_length() for cache in self._caches.values())
            assert cells <= driver.max_tokens
            if found is not None:
                emitted.append(found)
        return emitted

    def _result(self, asked: Pass) -> torch.Tensor:
        self.passes.append(asked)
        assert asked.ids is not None
        name, count = asked.context, asked.tokens
        if name not in self._caches:
            self._caches[name] = deepcopy(self._caches[asked.forks]) if asked.forks else DynamicCache()
            self._committed[name] = self._committed.get(asked.forks, 0)
        cache = self._caches[name]
        start = self._committed[name] if asked.after is None else asked.after
        assert 0 <= start <= cache.get_seq_length()
        if start < cache.get_seq_length():
            cache.crop(start - cache.get_seq_length())
        self._committed[name] = start + count if asked.commits else start
        positions = torch.arange(start, start + count) if asked.positions is None else asked.positions
        assert isinstance(positions, torch.Tensor)
        output = self._models[asked.tower](
            input_ids=torch.tensor([list(asked.ids)]),
            position_ids=positions[None],
            attention_mask=torch.where(self._visible(asked, start), 0.0, -torch.inf)[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[0]
        return logits if asked.logits is None else logits[list(asked.logits)]

    def _visible(self, asked: Pass, start: int) -> torch.Tensor:
        """The keys that each token sees, (T, start + T)."""
        index = torch.arange(asked.tokens)
        ends = {
            Mask.CAUSAL: index + 1,
            Mask.FULL: torch.full_like(index, asked.tokens),
            Mask.FRAMES: (index // max(1, asked.frame_tokens) + 1) * asked.frame_tokens,
        }[Mask.CAUSAL if self._causal else asked.mask]
        return torch.arange(start + asked.tokens)[None] < start + ends[:, None]


def answer(emitted: list[NewTokens]) -> list[int]:
    """The tokens of all emissions."""
    return [token for one in emitted for token in one.ids]
