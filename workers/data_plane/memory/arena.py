"""One piece of memory per worker, and the slots in it that tensors live in.

The file has its full length from the start and takes memory only as far as it was used, in chunks that are
made ready before they are written: those a slot needs at once, some more ahead of it in a thread. So a worker
that never hands on a tensor pays nothing, and one that does pays for no page fault on its way.

A slot has a generation, given once in the arena's life. Freeing takes it away first; then the pages may be
another slot's. What this process itself looks at is not handed out again until the last look at it is gone:
an engine that still computes into a slot whose scope has ended writes into nobody else's. Readers in other
processes hold nothing: they check the generation when they have read.

Thread-safe. Waits for memory to be made ready, and for nothing else.
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
"""A slot longer than this gives its memory back to the system."""


@dataclass(slots=True, eq=False)
class _Taken:
    """Pages that are not free: a tensor's, or kept by looks at what was one."""

    offset: int
    nbytes: int
    generation: int
    looks: int = 0
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Bytes and slots; `ready_bytes` is the memory it has taken so far."""

    total_bytes: int
    free_bytes: int
    largest_free_bytes: int
    ready_bytes: int
    slots: int


class Arena:
    """Slots over a backing made by `create(layout)`.

    Attributes:
        layout: where things are in its file.
        backing: that file.
    """

    def __init__(self, total_bytes: int, create: Callable[[Layout], Backing]) -> None:
        """An arena of at least one page.

        Raises:
            OSError: there is no such file to be had.
        """
        self.layout: Final = Layout.holding(total_bytes, epoch=secrets.randbits(63))
        self.backing: Final = create(self.layout)
        self._blocks = FreePages(self.layout.pages)
        self._chunks = ReadyChunks(self.backing, self.layout)
        self._words = memoryview(self.backing.memory)[WORDS_AT : self.layout.payload_at].cast("Q")
        self._reading = memoryview(self.backing.memory).toreadonly()
        self._lock = threading.Lock()
        self._slots: dict[int, _Taken] = {}
        # By chance, so that no two arenas have one in common, and a reader that is led to another arena by a
        # reused process id, port or address finds nothing of its own there.
        self._generation = secrets.randbits(62)
        # A view may die anywhere, also in a thread that holds the lock: its end is noted here, without it.
        self._ends: deque[_Taken] = deque()
        self._watched: dict[int, weakref.ref[Bytes]] = {}
        self._kept_pages = 0
        self._is_closed = False
        self._is_parents = False
        _alive.add(self)

    # ---- the owner's side ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Locator:
        """A slot of `nbytes`, with whatever was in it.

        Raises:
            CapacityError: there is no room, or the system has no memory for it.
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
                f"no memory for a tensor of {nbytes} bytes: {error.strerror}; the arena may have "
                f"{self._total_bytes}, of which {self._chunks.ready_bytes} were to be had"
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
        """End a slot; False where it has ended already."""
        with self._lock:
            taken = self._slots.pop(generation, None)
            if taken is None:
                return False
            # Ordered before any later write to these pages, also as other processes see it: whoever writes
            # there has taken this lock after us.
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
        """The bytes of a slot; its pages are no other tensor's until every view of them is gone.

        Raises:
            TensorGone: there is no such slot.
        """
        with self._lock:
            taken = self._find(locator)
            taken.looks += 1
        view = np.frombuffer(
            self.backing.memory if writable else self._reading, np.uint8, taken.nbytes, taken.offset
        )
        # Views of this view hold on to it: numpy's, torch's, a buffer's.
        ref = weakref.ref(view, lambda ref: self._end_look(taken, id(ref)))
        self._watched[id(ref)] = ref
        return view

    def check(self, locator: Locator) -> None:
        """Whether there is such a slot.

        Raises:
            TensorGone: there is none any more, or never was.
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
        """Have all memory ready and give none back: it is going to be registered with a device.

        Raises:
            OSError: the system does not have that much.
        """
        self._chunks.hold(self.layout.pages)

    def close(self) -> None:
        """Every slot is gone; views of them stay readable as long as there are any."""
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
        """With the lock held; None where there is no room."""
        self._must_be_own()
        if self._is_closed:
            raise CapacityError("the arena is closed: nothing goes in any more")
        self._note_ends()
        return self._blocks.take(pages)

    def _take_with_effort(self, pages: int, nbytes: int) -> int:
        """Look for room again, where dead views in a cycle may have kept some."""
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
        """Take note of views that died; with the lock held."""
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
            raise BugError("this arena is the parent process's: a forked child has none; start it by `spawn`")

    def disown(self) -> None:
        """In a forked child: what is mapped is the parent's."""
        self._is_closed = self._is_parents = True
        self._lock = threading.Lock()  # one that another thread held has nobody left to give it back
        self.backing.let_go()


_alive: Final[weakref.WeakSet[Arena]] = weakref.WeakSet()


def _disown_all() -> None:
    for arena in list(_alive):
        arena.disown()


os.register_at_fork(after_in_child=_disown_all)
