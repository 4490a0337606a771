"""An arena: one piece of memory per worker, divided into slots for tensors.

The file has its full length from the start, but takes memory only as it is used, in chunks that are made
resident before they are written: the chunks of a slot at once, and some more ahead of it in a thread. So an
unused arena costs nothing, and a used one causes no page faults.

A slot has a generation, assigned once in the arena's lifetime. Freeing a slot removes the generation first;
then its pages may be reused. Pages that this process views are not reused until the last view is gone, so an
engine that still computes into a slot of an ended scope overwrites no other tensor. Readers in other
processes hold nothing: they check the generation after reading.

Thread-safe. Waits only for memory to become resident.
"""

import gc
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from shared.errors import BugError, CapacityError, TensorGone
from workers.data_plane.memory.backing import Backing
from workers.data_plane.memory.free_pages import FreePages
from workers.data_plane.memory.layout import PAGE, WORDS_AT, Layout, pages_of
from workers.data_plane.memory.prefault import ReadyChunks
from workers.data_plane.memory.source import Slot
from workers.data_plane.port import Bytes
from workers.data_plane.transport import SEGMENT, Locator

OVERSIZE_BYTES: Final = 256 << 20
"""A longer slot returns its memory to the system when it is freed."""


@dataclass(slots=True, eq=False)
class _Taken:
    """Allocated pages: a tensor's, or those of a freed tensor with live views."""

    offset: int
    nbytes: int
    generation: int
    looks: int = 0
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Bytes and slots; `ready_bytes` is the resident memory."""

    total_bytes: int
    free_bytes: int
    largest_free_bytes: int
    ready_bytes: int
    slots: int


class Arena:
    """Slots in a file made by `create(layout)`.

    Attributes:
        layout: the layout of the file.
        backing: the file.
    """

    def __init__(self, total_bytes: int, create: Callable[[Layout], Backing]) -> None:
        """An arena of at least one page.

        Raises:
            OSError: the file cannot be made.
        """
        self.layout: Final = Layout.holding(total_bytes, epoch=secrets.randbits(63))
        self.backing: Final = create(self.layout)
        self._blocks = FreePages(self.layout.pages)
        self._chunks = ReadyChunks(self.backing, self.layout)
        self._words = memoryview(self.backing.memory)[WORDS_AT : self.layout.payload_at].cast("Q")
        self._reading = memoryview(self.backing.memory).toreadonly()
        self._lock = threading.Lock()
        self._slots: dict[int, _Taken] = {}
        # Random, so that no two arenas share a generation: a reader that a reused process id, port or address
        # leads to another arena finds no tensor there.
        self._generation = secrets.randbits(62)
        # A view may be collected in any thread, even one that holds the lock; so its end is noted without it.
        self._ends: deque[_Taken] = deque()
        self._watched: dict[int, weakref.ref[Bytes]] = {}
        self._kept_pages = 0
        self._is_closed = False
        self._is_parents = False
        _alive.add(self)

    # ---- for the owner ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Locator:
        """Return a slot of `nbytes`, uninitialised.

        Raises:
            CapacityError: the arena is full, or the system has no memory.
        """
        pages = pages_of(nbytes)
        with self._lock:
            start = self._take(pages)
        if start is None:
            start = self._take_with_effort(pages, nbytes)
        offset = self.layout.payload_at + start * PAGE
        try:
            self._chunks.make_ready(start, start + pages)
        except OSError as error:
            with self._lock:
                self._blocks.give(start, pages)
            raise CapacityError(
                f"no memory for a tensor of {nbytes} bytes: {error.strerror}; the arena has "
                f"{self._chunks.ready_bytes} bytes of at most {self._total_bytes}"
            ) from error
        with self._lock:
            self._generation += 1
            taken = _Taken(offset, nbytes, self._generation)
            self._slots[taken.generation] = taken
            word = self.layout.word_of(offset)
            self._words[word + 1] = nbytes
            self._words[word] = taken.generation
        return Locator(SEGMENT, offset, nbytes, taken.generation)

    def free(self, generation: int) -> bool:
        """Free a slot; return False if it is free already."""
        with self._lock:
            taken = self._slots.pop(generation, None)
            if taken is None:
                return False
            # Other processes see this before any later write to the pages, because the writer takes this lock
            # later.
            word = self.layout.word_of(taken.offset)
            self._words[word] = 0
            self._words[word + 1] = 0
            self._note_ends()
            taken.is_free = True
            if taken.looks:
                self._kept_pages += pages_of(taken.nbytes)
            else:
                self._give(taken)
            return True

    def look(self, locator: Locator, *, writable: bool = False) -> Bytes:
        """Return a view of a slot; its pages are not reused until every view of them is gone.

        Raises:
            TensorGone: the slot does not exist.
        """
        with self._lock:
            taken = self._find(locator)
            taken.looks += 1
        view = np.frombuffer(
            self.backing.memory if writable else self._reading, np.uint8, taken.nbytes, taken.offset
        )
        # Views of this view keep it alive: numpy's, torch's, a buffer's.
        ref = weakref.ref(view, lambda ref: self._end_look(taken, id(ref)))
        self._watched[id(ref)] = ref
        return view

    def check(self, locator: Locator) -> None:
        """Check that a slot is live.

        Raises:
            TensorGone: the slot was freed, or never existed.
        """
        with self._lock:
            self._find(locator)

    def holds(self, generation: int) -> bool:
        return generation in self._slots

    def stats(self) -> ArenaStats:
        with self._lock:
            self._note_ends()
            return ArenaStats(
                total_bytes=self._total_bytes,
                free_bytes=self._blocks.free * PAGE,
                largest_free_bytes=self._blocks.largest * PAGE,
                ready_bytes=self._chunks.ready_bytes,
                slots=len(self._slots),
            )

    def hold(self) -> None:
        """Make all memory resident and keep it, for registration with a device.

        Raises:
            OSError: the system has not that much memory.
        """
        self._chunks.hold(self.layout.pages)

    def close(self) -> None:
        """Free all slots; existing views stay readable."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for taken in self._slots.values():
                self._words[self.layout.word_of(taken.offset)] = 0
            self._slots.clear()
        self._chunks.close()
        self.backing.close()
        _alive.discard(self)

    # ---- for transports that serve it (`transports.source.Source`) --------------------------------------

    def descriptor(self, segment: int) -> int:
        self._must_be(segment)
        return self.backing.fd

    def length(self, segment: int) -> int:
        self._must_be(segment)
        return self.layout.length

    def slot(self, segment: int, offset: int) -> Slot | None:
        if segment != SEGMENT or not self.layout.begins_tensor(offset):
            return None
        word = self.layout.word_of(offset)
        generation = self._words[word]
        return Slot(generation, self._words[word + 1]) if generation else None

    # ---- inside ----------------------------------------------------------------------------------------

    @property
    def _total_bytes(self) -> int:
        return self._blocks.total * PAGE

    def _find(self, locator: Locator) -> _Taken:
        self._must_be_own()
        taken = self._slots.get(locator.generation)
        if taken is None or (locator.segment, locator.offset, locator.nbytes) != (
            SEGMENT,
            taken.offset,
            taken.nbytes,
        ):
            raise TensorGone(f"slot {locator.generation} at {locator.offset} was freed, or never was")
        return taken

    def _take(self, pages: int) -> int | None:
        """Take pages; None if there is no room. Call with the lock held."""
        self._must_be_own()
        if self._is_closed:
            raise CapacityError("the arena is closed")
        self._note_ends()
        return self._blocks.take(pages)

    def _take_with_effort(self, pages: int, nbytes: int) -> int:
        """Collect garbage, which may hold views in reference cycles, and take pages again."""
        if self._kept_pages:
            gc.collect()
        with self._lock:
            start = self._take(pages)
            if start is not None:
                return start
            raise CapacityError(
                f"the arena is full: no room for a tensor of {nbytes} bytes among {self._blocks.free * PAGE} "
                f"free of {self._total_bytes}, {self._blocks.largest * PAGE} in one piece; "
                f"{len(self._slots)} tensors live, and {self._kept_pages * PAGE} bytes are kept by views of "
                "freed ones"
            )

    def _end_look(self, taken: _Taken, watched: int) -> None:
        self._ends.append(taken)
        self._watched.pop(watched, None)

    def _note_ends(self) -> None:
        """Process the ends of views. Call with the lock held."""
        while self._ends:
            taken = self._ends.popleft()
            taken.looks -= 1
            if taken.is_free and not taken.looks:
                self._kept_pages -= pages_of(taken.nbytes)
                self._give(taken)

    def _give(self, taken: _Taken) -> None:
        start = (taken.offset - self.layout.payload_at) // PAGE
        pages = pages_of(taken.nbytes)
        if taken.nbytes > OVERSIZE_BYTES:
            self._chunks.give_back(start, start + pages)
        self._blocks.give(start, pages)

    def _must_be(self, segment: int) -> None:
        if segment != SEGMENT:
            raise LookupError(f"segment {segment}: this arena has only segment {SEGMENT}")

    def _must_be_own(self) -> None:
        if self._is_parents:
            raise BugError(
                "this arena belongs to the parent process; start the child with `spawn`, not `fork`"
            )

    def disown(self) -> None:
        """Detach from the parent's arena, in a forked child."""
        self._is_closed = self._is_parents = True
        self._lock = threading.Lock()  # the thread that held the old one does not exist in the child
        self.backing.let_go()


_alive: Final[weakref.WeakSet[Arena]] = weakref.WeakSet()


def _disown_all() -> None:
    for arena in list(_alive):
        arena.disown()


os.register_at_fork(after_in_child=_disown_all)
