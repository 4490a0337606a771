"""Pooling of a prompt's hidden states into one vector (an embedding), or their collection without pooling.

A prompt is computed in spans, so its states arrive in parts and are folded: only a vector is kept, or, if
the request wants all states, one row per token on the host. Each state counts once, also if its sequence was
preempted and is computed again. All sums are in float32.
"""

import numpy as np
import torch

from workers.data_plane.port import Array
from workers.kv_engine.sequence_spec import Pooling, PoolingMode


class StatePooler:
    """The pooled states of one prompt so far."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._folded: torch.Tensor | None = None  # (hidden,) float32
        self._weight = 0
        self._kept: list[torch.Tensor] = []  # (n, hidden) float32, on the host

    def add(self, states: torch.Tensor, start: int) -> None:
        """Fold the next states, (n, hidden), of the tokens from position `start` on."""
        count = len(states)
        if not count:
            return
        match self._pooling.mode:
            case PoolingMode.FIRST:
                self._folded = states[0].float() if start == 0 else self._folded
            case PoolingMode.LAST:
                self._folded = states[-1].float()
            case PoolingMode.MAX:
                found = states.amax(dim=0).float()
                self._folded = found if self._folded is None else torch.maximum(self._folded, found)
            case PoolingMode.MEAN | PoolingMode.MEAN_SQRT:
                self._sum(states.float().sum(dim=0), count)
            case PoolingMode.WEIGHTED_MEAN:
                weights = torch.arange(start + 1, start + count + 1, device=states.device)
                self._sum(weights.float() @ states.float(), int(weights.sum()))
            case PoolingMode.NONE:
                self._kept.append(states.float().cpu())

    def _sum(self, states: torch.Tensor, weight: int) -> None:
        self._folded = states if self._folded is None else self._folded + states
        self._weight += weight

    def vector(self) -> Array:
        """Return the pooled vector, (dimensions,) float32, or all states, (tokens, hidden), without pooling.

        The first `dimensions` numbers are taken before normalisation, so shorter vectors also have length 1.
        """
        if self._kept:
            return _array(torch.cat(self._kept))
        assert self._folded is not None, "a prompt has a token"
        weight = self._weight**0.5 if self._pooling.mode is PoolingMode.MEAN_SQRT else self._weight
        found = self._folded / weight if weight else self._folded
        found = found[: self._pooling.dimensions]
        if self._pooling.normalize:
            found = torch.nn.functional.normalize(found, dim=0)
        return _array(found)


def _array(found: torch.Tensor) -> Array:
    data = found.cpu().numpy().astype("<f4")
    return Array(dtype="float32", shape=data.shape, data=data.reshape(-1).view(np.uint8))
