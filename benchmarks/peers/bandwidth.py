"""Read bandwidth of this machine's memory: the limit of a decode, which reads every weight."""

import time
from typing import Final

import torch

_BYTES: Final = 1 << 30
_PASSES: Final = 6


class Memory:
    """A gigabyte of memory, far larger than the caches, read by as many threads as torch has cores."""

    def __init__(self) -> None:
        self._words = torch.ones(_BYTES // 8, dtype=torch.int64)

    def bytes_per_s(self) -> float:
        """Measure the fastest of several passes. Each computes the maximum, the cheapest reduction."""
        return _BYTES / min(self._pass_s() for _ in range(_PASSES))

    def _pass_s(self) -> float:
        begun_s = time.perf_counter()
        self._words.amax()
        return time.perf_counter() - begun_s
