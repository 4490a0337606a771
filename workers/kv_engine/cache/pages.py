"""A pool's pages, taken from the operating system before a step wants them.

A pool is larger than what most of its answers need, so its memory is not there until it is used, from the
first block on (`workers.machine.memory.zeros`). But a step whose tokens are the first on their pages waits
for these,
and all its threads with it: 2.6 s for each gigabyte where a virtual machine's host has to find them, a fifth
of a prompt's time. So they are taken while nobody asks for anything, some thousand tokens before they are
wanted. Not beside steps: who takes pages has one of the cores that steps compute on. A worker that never
rests takes them in its steps.
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
"""So many tokens' pages are taken ahead, as far as there was time."""
MOST_BYTES: Final = 2**30
"""No more than that ahead: where tokens take much, steps are slow, and fewer tokens are enough."""
_AT_ONCE: Final = 1024
"""Tokens: the next layers' first pages are there before this layer's last."""
TURN_S: Final = 0.005
"""How long a turn is; then it is asked again whether there is a step to compute."""
_MADV_POPULATE_WRITE: Final = 23  # of Linux 5.14; Python has no name for it


class Pages:
    """The pages of a pool's layers.

    Args:
        cells: keys and values of each layer, (slots, ...) on the CPU, whose memory is there when it is used.

    Attributes:
        ahead: so many tokens' pages are taken before they are wanted.
        taken: the cells before this one have their pages, or steps took them.
    """

    def __init__(self, cells: Sequence[torch.Tensor]) -> None:
        self._cells: Final = cells  # they hold the memory
        self._slots: Final = len(cells[0])
        self._places: Final = [(part.data_ptr(), part.nbytes // self._slots) for part in cells]
        self.ahead: Final = max(1, min(AHEAD, MOST_BYTES // sum(nbytes for _, nbytes in self._places)))
        self.taken = 0
        self._used = 0
        self._is_refused = sys.platform != "linux"
        self._parts = self._missing()

    def reach(self, tokens: int) -> None:
        """So many cells are in use, from the first on."""
        self._used = tokens

    def take(self, most_s: float) -> bool:
        """Take pages for so long; whether any are left to take."""
        if self._is_refused:
            return False
        begun_s = time.monotonic()
        for address, nbytes in self._parts:
            if number := _populate(address, nbytes):
                self._is_refused = True
                _LOGGER.info("pages of the KV pool are taken when they are used: %s", os.strerror(number))
                return False
            if time.monotonic() - begun_s > most_s:
                return True
        self._parts = self._missing()
        return False

    def _missing(self) -> Iterator[tuple[int, int]]:
        """The next pages to take, part by part: where they are, and how many bytes."""
        while True:
            first = max(self.taken, self._used)
            count = min(_AT_ONCE, self._used + self.ahead - first, self._slots - first)
            if count <= 0:
                return
            for address, nbytes in self._places:
                yield address + first * nbytes, count * nbytes
            self.taken = first + count


def _populate(address: int, nbytes: int) -> int:
    """Have the operating system give all pages of a range; 0, or the error's number."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    # By ctypes, for Python's own `madvise` keeps the interpreter's lock meanwhile.
    c = ctypes.CDLL(None, use_errno=True)
    failed = c.madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), _MADV_POPULATE_WRITE
    )
    return ctypes.get_errno() if failed else 0
