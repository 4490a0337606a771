"""A pool's pages, taken from the operating system before a step wants them.

A pool is larger than what most of its answers need, so its memory is not there until it is used, from the
first block on (`workers.memory.zeros`). But a step whose tokens are the first on their pages waits for these,
and all its threads with it: 2.6 s for each gigabyte where a virtual machine's host has to find them, a fifth
of a prompt's time. So they are taken beside the steps, some thousand tokens before they are wanted.
"""

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Sequence
from threading import Thread
from typing import Final

import torch

_LOGGER: Final = logging.getLogger(__name__)

AHEAD: Final = 8192
"""So many tokens' pages are there before they are wanted; when half of them are used, more are taken."""
MOST_BYTES: Final = 2**30
"""No more than that ahead: where tokens take much, steps are slow, and fewer tokens are enough."""
WAIT_S: Final = 1.0
"""So long a start waits for the first of them: a virtual machine's host may be slow to find them."""
_AT_ONCE: Final = 1024
"""Tokens: the next layers' first pages are there before this layer's last."""
_MADV_POPULATE_WRITE: Final = 23  # of Linux 5.14; Python has no name for it


class Pages:
    """The pages of a pool's layers.

    Args:
        cells: keys and values of each layer, (slots, ...) on the CPU, whose memory is there when it is used.

    Attributes:
        ahead: so many tokens' pages are taken before they are wanted.
        taken: the cells before this one have their pages, or were asked for.
    """

    def __init__(self, cells: Sequence[torch.Tensor]) -> None:
        self._cells: Final = cells  # they hold the memory, while a thread is at it too
        self._slots: Final = len(cells[0])
        # The thread sees numbers alone: one that is in torch when the interpreter ends may abort the process.
        self._places: Final = [(part.data_ptr(), part.nbytes // self._slots) for part in cells]
        self.ahead: Final = max(1, min(AHEAD, MOST_BYTES // sum(nbytes for _, nbytes in self._places)))
        self.taken = 0
        self._taking: Thread | None = None
        self._is_refused = sys.platform != "linux"

    def reach(self, tokens: int) -> None:
        """So many cells are in use, from the first on. Returns at once."""
        if self.taken - tokens >= self.ahead // 2 or self._is_refused or self.taken >= self._slots:
            return
        if self._taking is None or not self._taking.is_alive():
            # Not for ever, so that a pool that is let go of is gone.
            begin, self.taken = self.taken, min(tokens + self.ahead, self._slots)
            self._taking = Thread(target=self._take, args=(begin, self.taken), name="pages", daemon=True)
            self._taking.start()

    def wait(self, most_s: float | None = None) -> None:
        """Until all is there that was asked for, or so long."""
        if self._taking is not None:
            self._taking.join(most_s)

    def _take(self, begin: int, end: int) -> None:
        for first in range(begin, end, _AT_ONCE):
            count = min(_AT_ONCE, end - first)
            for address, nbytes in self._places:
                if number := _populate(address + first * nbytes, count * nbytes):
                    self._is_refused = True
                    _LOGGER.info("pages of the KV pool are taken when they are used: %s", os.strerror(number))
                    return


def _populate(address: int, nbytes: int) -> int:
    """Have the operating system give all pages of a range; 0, or the error's number."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    # By ctypes, for Python's own `madvise` keeps the interpreter's lock meanwhile.
    c = ctypes.CDLL(None, use_errno=True)
    failed = c.madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), _MADV_POPULATE_WRITE
    )
    return ctypes.get_errno() if failed else 0
