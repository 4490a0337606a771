"""How fast this machine reads its memory: what limits a decode of one request, which reads every weight."""

import time
from typing import Final

import torch

_BYTES: Final = 1 << 30
_PASSES: Final = 6


class Memory:
    """A gigabyte, far more than any cache holds, and reads of it by as many threads as torch has cores."""

    def __init__(self) -> None:
        self._words = torch.ones(_BYTES // 8, dtype=torch.int64)

    def bytes_per_s(self) -> float:
        """The fastest of some passes: it is a limit. Their largest word is asked for, which costs least."""
        return _BYTES / min(self._pass_s() for _ in range(_PASSES))

    def _pass_s(self) -> float:
        begun_s = time.perf_counter()
        self._words.amax()
        return time.perf_counter() - begun_s
