"""Warm memory that fetched tensors land in.

Fresh memory costs ten times what copying does: the kernel zeroes each page at its first touch. So blocks are
kept and lent again, the last one returned first. Nobody gives a block back: it comes home by itself when the
last view of it is gone, also a view of a view, numpy's or torch's.

Bounded: what is lent and what is kept together stay under `limit_bytes`. Who asks for more is told so: all of
it is held by readers.
"""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from workers.data_plane.port import Bytes
from workers.data_plane.transports.port import TransportError

_SMALLEST: Final = 64 * 1024
_STEPS: Final = 4
"""Sizes of blocks between one power of two and the next: a block is at most a quarter larger than asked."""


@dataclass(frozen=True, slots=True)
class LandingStats:
    """How many bytes of blocks there are, and how many of them readers hold."""

    total_bytes: int
    lent_bytes: int


class Landing:
    """Lends writable memory, one-dimensional, of any length.

    `on_new` is told each new block once, before it is lent: a network card wants to know memory beforehand.
    """

    def __init__(self, limit_bytes: int, *, on_new: Callable[[Bytes], None] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._on_new = on_new
        self._lock = threading.Lock()
        self._kept: dict[int, list[Bytes]] = {}
        self._total_bytes = self._lent_bytes = 0
        # A view may die anywhere, also in a thread that holds the lock: coming home must not take it.
        self._home: deque[Bytes] = deque()

    def take(self, nbytes: int) -> Bytes:
        """Memory of `nbytes`, with whatever was in it; it comes home when its last view is gone.

        Raises:
            TransportError: readers hold so much that there is no room under the limit.
        """
        size = block_size(nbytes)
        with self._lock:
            self._collect()
            block = self._block(size)
        loan = _Loan(block[:nbytes])
        weakref.finalize(loan, self._home.append, block).atexit = False
        return np.asarray(loan)

    def stats(self) -> LandingStats:
        with self._lock:
            self._collect()
            return LandingStats(self._total_bytes, self._lent_bytes)

    def _collect(self) -> None:
        while self._home:
            block = self._home.popleft()
            self._lent_bytes -= block.nbytes
            self._kept.setdefault(block.nbytes, []).append(block)

    def _block(self, size: int) -> Bytes:
        if kept := self._kept.get(size):
            block = kept.pop()
        else:
            self._make_room(size)
            block = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
            if self._on_new is not None:
                self._on_new(block)
            self._total_bytes += size
        self._lent_bytes += size
        return block

    def _make_room(self, size: int) -> None:
        if self._lent_bytes + size > self._limit_bytes:
            raise TransportError(
                f"no room for {size} bytes: readers hold {self._lent_bytes} of {self._limit_bytes}; "
                "let go of views earlier, or give the data plane more memory"
            )
        for kept_size in sorted(self._kept, reverse=True):
            while self._total_bytes + size > self._limit_bytes and self._kept[kept_size]:
                self._kept[kept_size].pop()
                self._total_bytes -= kept_size


class _Loan:
    """What all views of a block hold on to: numpy and torch keep it alive through their own views."""

    def __init__(self, memory: Bytes) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


def block_size(nbytes: int) -> int:
    """The size of the block that `nbytes` are put into: few sizes, so that blocks fit again."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << (nbytes - 1).bit_length()) // 2 // _STEPS
    return -(-nbytes // step) * step
