"""Resident memory of an arena, in chunks; more is made resident before it is needed."""

import logging
import threading
from typing import Final

from workers.data_plane.memory.backing import Backing
from workers.data_plane.memory.layout import PAGE, PAIR_BYTES, WORDS_AT, Layout

_LOGGER: Final = logging.getLogger(__name__)

CHUNK: Final = 1 << 20
"""The size of a chunk."""
AHEAD: Final = 32
"""The number of chunks made resident beyond the needed ones."""

_CHUNK_PAGES: Final = CHUNK // PAGE
_CHUNK_WORDS: Final = _CHUNK_PAGES * PAIR_BYTES
assert _CHUNK_WORDS % PAGE == 0


class ReadyChunks:
    """The resident chunks of a backing; none at first."""

    def __init__(self, backing: Backing, layout: Layout) -> None:
        self._backing = backing
        self._layout = layout
        self._ready = bytearray(-(-layout.pages // _CHUNK_PAGES))
        self._is_held = False
        self._ahead: threading.Thread | None = None
        self._ahead_until = 0
        self._is_closing = False

    @property
    def ready_bytes(self) -> int:
        return self._ready.count(1) * CHUNK

    def make_ready(self, start: int, stop: int) -> None:
        """Make these pages resident, and start to do so with some after them.

        Raises:
            OSError: the system has no memory for them.
        """
        first, last = start // _CHUNK_PAGES, -(-stop // _CHUNK_PAGES)
        while (cold := self._ready.find(0, first, last)) >= 0:
            warm = self._ready.find(1, cold, last)
            self._make_ready(cold, last if warm < 0 else warm)
        if self._ready.find(0, last, last + AHEAD // 2) >= 0:
            self._go_ahead(last + AHEAD)

    def give_back(self, start: int, stop: int) -> None:
        """Return chunks that lie completely within these pages to the system."""
        first, last = -(-start // _CHUNK_PAGES), stop // _CHUNK_PAGES
        if first < last and self._backing.may_shrink and not self._is_held:
            self._ready[first:last] = bytes(last - first)
            self._backing.give_back(*self._payload(first, last))

    def hold(self, pages: int) -> None:
        """Return nothing from now on, and make all pages resident.

        Raises:
            OSError: the system has no memory for them.
        """
        self._is_held = True
        self.make_ready(0, pages)

    def close(self) -> None:
        self._is_closing = True
        if self._ahead is not None:
            self._ahead.join()

    def _make_ready(self, first: int, last: int) -> None:
        """Make chunks resident. Two threads may do so for the same chunk, which is harmless."""
        words = WORDS_AT + first * _CHUNK_WORDS, WORDS_AT + last * _CHUNK_WORDS
        self._backing.make_ready(words[0], min(words[1], self._layout.payload_at))
        self._backing.make_ready(*self._payload(first, last))
        self._ready[first:last] = b"\1" * (last - first)

    def _payload(self, first: int, last: int) -> tuple[int, int]:
        at = self._layout.payload_at
        return at + first * CHUNK, min(at + last * CHUNK, self._layout.length)

    # ---- ahead -----------------------------------------------------------------------------------------

    def _go_ahead(self, until: int) -> None:
        self._ahead_until = until
        if self._ahead is None or not self._ahead.is_alive():
            self._ahead = threading.Thread(target=self._run_ahead, name="arena-ahead", daemon=True)
            self._ahead.start()

    def _run_ahead(self) -> None:
        while not self._is_closing:
            chunk = self._ready.find(0, max(self._ahead_until - AHEAD, 0), self._ahead_until)
            if chunk < 0:
                return
            try:
                self._make_ready(chunk, chunk + 1)
            except OSError as error:
                # The allocation that needs it reports the lack; there may be memory by then.
                _LOGGER.debug("no memory ahead of what tensors need now: %s", error)
                return
