"""Hidden states to one vector: what a prompt comes to for who asked for its embedding.

A prompt is computed in spans, so its states come in parts, which are folded: nothing is kept but a vector.
Each state counts once, also where a sequence was preempted and is computed again. In float32, whatever the
model computes in.
"""

import numpy as np
import torch

from workers.data_plane.port import Array
from workers.engine.sequence import Pooling, PoolingMode


class Pool:
    """The states of one prompt, folded so far."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._folded: torch.Tensor | None = None  # (hidden,) float32
        self._weight = 0

    def add(self, states: torch.Tensor, start: int) -> None:
        """Take the next states, (n, hidden), of the tokens from position `start` on."""
        count = len(states)
        if not count:
            return
        match self._pooling.mode:
            case PoolingMode.FIRST:
                self._folded = states[0].float() if start == 0 else self._folded
            case PoolingMode.LAST:
                self._folded = states[-1].float()
            case PoolingMode.MEAN:
                self._sum(states.float().sum(dim=0), count)
            case PoolingMode.WEIGHTED_MEAN:
                weights = torch.arange(start + 1, start + count + 1, device=states.device)
                self._sum(weights.float() @ states.float(), int(weights.sum()))

    def _sum(self, states: torch.Tensor, weight: int) -> None:
        self._folded = states if self._folded is None else self._folded + states
        self._weight += weight

    def vector(self) -> Array:
        """What the prompt came to: (dimensions,) float32.

        The first `dimensions` are taken before they are brought to length 1: so a part has length 1, too.
        """
        assert self._folded is not None, "a prompt has a token"
        found = self._folded / self._weight if self._weight else self._folded
        found = found[: self._pooling.dimensions]
        if self._pooling.normalize:
            found = torch.nn.functional.normalize(found, dim=0)
        data = found.cpu().numpy().astype("<f4")
        return Array(dtype="float32", shape=data.shape, data=data.view(np.uint8))
