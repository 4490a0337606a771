"""Prefault of the KV pool on a CPU: memory pages are committed while the engine is idle.

A pool is larger than most answers need, so its memory is reserved and committed on first use
(`workers.machine.memory.zeros`), from the first block on. A step that first uses a page waits for it with all
its threads. Under a hypervisor that has to find the memory, this takes 2.6 s per gigabyte: a fifth of a
prompt's time. So the pages of the next thousands of tokens are committed ahead, in idle time only: a thread
that commits pages next to a step takes one of the step's cores. A worker that is never idle commits them in
its steps.
"""

import ctypes
import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch

_LOGGER: Final = logging.getLogger(__name__)

AHEAD: Final = 8192
"""The number of tokens whose pages are committed ahead of their use."""
MAX_AHEAD_BYTES: Final = 2**30
"""The most memory ahead: where tokens are large, steps are slow, and fewer tokens suffice."""
_AT_ONCE: Final = 1024
"""Tokens: the first pages of all layers are committed before the last pages of the first layer."""
TURN_S: Final = 0.005
"""The duration of one turn, after which the engine looks for work again."""
_MADV_POPULATE_WRITE: Final = 23  # of Linux 5.14; Python has no name for it


class PagePrefault:
    """Commits the memory pages of a pool's layers.

    Args:
        cells: keys and values of each layer, (slots, ...) on the CPU, in memory that is committed on first
            use.

    Attributes:
        ahead: the number of cells that are committed ahead of their use.
        taken: the cells before this one are committed, or in use.
    """

    def __init__(self, cells: Sequence[torch.Tensor]) -> None:
        self._cells: Final = cells  # keeps the memory alive
        self._slots: Final = len(cells[0])
        self._places: Final = [(part.data_ptr(), part.nbytes // self._slots) for part in cells]
        self.ahead: Final = max(1, min(AHEAD, MAX_AHEAD_BYTES // sum(nbytes for _, nbytes in self._places)))
        self.taken = 0
        self._used = 0
        self._is_refused = sys.platform != "linux"
        self._ranges = self._next_ranges()

    def mark_used(self, cells: int) -> None:
        """Note that the first `cells` cells are in use."""
        self._used = cells

    def commit(self, max_s: float) -> bool:
        """Commit pages for `max_s` seconds; return True if there are more to commit."""
        if self._is_refused:
            return False
        begun_s = time.monotonic()
        for address, nbytes in self._ranges:
            if number := _populate(address, nbytes):
                self._is_refused = True
                _LOGGER.info("pages of the KV pool are committed on first use: %s", os.strerror(number))
                return False
            if time.monotonic() - begun_s > max_s:
                return True
        self._ranges = self._next_ranges()
        return False

    def _next_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the memory ranges to commit next: address and number of bytes."""
        while True:
            first = max(self.taken, self._used)
            count = min(_AT_ONCE, self._used + self.ahead - first, self._slots - first)
            if count <= 0:
                return
            for address, nbytes in self._places:
                yield address + first * nbytes, count * nbytes
            self.taken = first + count


def _populate(address: int, nbytes: int) -> int:
    """Commit all pages of a memory range; return 0, or the number of the operating system's error."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    # By ctypes: Python's own `madvise` holds the interpreter lock meanwhile.
    c = ctypes.CDLL(None, use_errno=True)
    failed = c.madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), _MADV_POPULATE_WRITE
    )
    return ctypes.get_errno() if failed else 0
