"""An arena of one segment, for transports: real memory behind a real descriptor, slots put in by hand."""

import mmap
import os
from collections.abc import Callable
from typing import Final

import numpy as np

from workers.data_plane.memory.source import Slot
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator

PAGE: Final = 4096


class HandMadeSource:
    """Slots are put one behind the other. `on_slot` is called before each look at a slot."""

    def __init__(self, nbytes: int = 16 * 1024 * 1024) -> None:
        self._descriptor = os.memfd_create("hand-made")
        os.ftruncate(self._descriptor, nbytes)
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)
        self.slots: dict[int, Slot] = {}
        self.on_slot: Callable[[], None] = lambda: None
        self._next = PAGE
        self._generation = 0

    def close(self) -> None:
        os.close(self._descriptor)

    def put(self, data: bytes) -> Locator:
        at = self._next
        self.memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._generation += 1
        self.slots[at] = Slot(self._generation, len(data))
        self._next += -(-max(1, len(data)) // PAGE) * PAGE
        return Locator(0, at, len(data), self._generation)

    def replace(self, at: Locator, byte: int) -> Locator:
        """Free a slot, and put another tensor into it: `byte` all over."""
        self._generation += 1
        self.slots[at.offset] = Slot(self._generation, at.nbytes)
        self.memory[at.offset : at.offset + at.nbytes] = byte
        return Locator(0, at.offset, at.nbytes, self._generation)

    # ---- Source ----------------------------------------------------------------------------------------

    def descriptor(self, segment: int) -> int:
        self.length(segment)
        return self._descriptor

    def length(self, segment: int) -> int:
        if segment != 0:
            raise LookupError(f"no segment {segment}")
        return len(self.memory)

    def slot(self, segment: int, offset: int) -> Slot | None:
        self.on_slot()
        return self.slots.get(offset)


class FreshMemory:
    """A landing without limits."""

    def take(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)
