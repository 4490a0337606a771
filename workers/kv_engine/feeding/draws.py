"""Choices of a node between two of its tokens: by the sampling parameters and seeds of each sequence.

They are drawn as tokens are (`workers.kv_engine.sampling.sampler`), so they depend on nothing but the logits,
the seed, the node, the name of the choice and the number of the token.
"""

from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import torch

from models.feeding import Draw
from workers.kv_engine.gpu.token_sampler import sample
from workers.kv_engine.sampling.sampler import node_key
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import Sampling
from workers.machine.transfers import upload

_LOW: Final = np.uint64(0xFFFFFFFF)
_GREEDY: Final = Sampling()


class InnerDraw:
    """Makes the draws of steps.

    Args:
        node: the name of the node.
    """

    def __init__(self, node: str, device: torch.device) -> None:
        self._node = node
        self._device = device
        self._keys: dict[str, int] = {}

    def of(self, sequences: Items[Sequence]) -> Draw:
        """Return the draw for the sequences of a step, in their order."""
        samplings = [one.spec.feed.sampling if one.spec.feed else _GREEDY for one in sequences]
        if all(sampling.temperature == 0 for sampling in samplings):
            return _greedy
        rows = self._rows(samplings, [one.generated for one in sequences])

        def draw(logits: torch.Tensor, name: str) -> torch.Tensor:
            key = self._keys.setdefault(name, node_key(f"{self._node}.{name}"))
            return sample(logits.float(), rows, key).clamp(min=0)

        return draw

    def _rows(self, samplings: Items[Sampling], draws: Items[int]) -> SamplingRows:
        seeds = np.array([one.seed for one in samplings], np.int64).view(np.uint64)
        is_random = [one.temperature > 0 for one in samplings]

        def ints(values: object) -> torch.Tensor:
            return upload(np.asarray(values, np.int32), self._device)

        def floats(values: Items[float]) -> torch.Tensor:
            return upload(np.array(values, np.float32), self._device)

        return SamplingRows(
            temperature=floats([one.temperature for one in samplings]),
            top_p=floats([one.top_p for one in samplings]),
            top_k=ints([max(one.top_k, 0) for one in samplings]),
            min_p=floats([one.min_p for one in samplings]),
            seed_low=ints((seeds & _LOW).astype(np.uint32).view(np.int32)),
            seed_high=ints((seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)),
            sample_index=ints([one.sample_index for one in samplings]),
            draw_index=ints(draws),
            is_random=any(is_random),
            has_top_k=any(one.top_k > 0 for one in samplings),
            has_top_p=any(one.top_p < 1 for one in samplings),
            has_min_p=any(one.min_p > 0 for one in samplings),
            candidates=None,
        )


def _greedy(logits: torch.Tensor, name: str) -> torch.Tensor:
    return logits.argmax(dim=-1)
