"""The arena on a GPU: one `cudaMalloc`, exported once, with slots like those of the arena in main memory.

    device memory                      the tensors
    a slot of the arena in memory      per page, its generation and length (`words`)

So a reader in any process checks a generation in main memory. The memory is CUDA's own and not from a pool:
`expandable_segments` and the like have no effect on it, and it can be exported to other processes.

The writer of a tensor records an event on its stream (`written`); a reader's stream waits for that event.
Events take turns. If one is recorded again before a reader has waited for it, the reader waits a little
longer, which does no harm.

The tests use a fake driver; `benchmarks.handoff_gpu` ran on one GPU (docs/log.md, 2026-11-27).
"""

import itertools
import logging
import secrets
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shared.errors import CapacityError, TensorGone
from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.cuda_driver import EVENT_FLAGS, Driver
from workers.data_plane.memory.free_pages import FreePages
from workers.data_plane.memory.layout import PAGE, PAIR_BYTES, pages_of
from workers.data_plane.transport import DEVICE_SEGMENT, Locator

_LOGGER: Final = logging.getLogger(__name__)

EVENTS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBytes:
    """A tensor's bytes on a GPU: `torch.as_tensor(found, device="cuda")` views them, cupy does, too.

    Attributes:
        keeps: an object that has to live as long as this one.
    """

    pointer: int
    nbytes: int
    keeps: object

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream: the reader's own stream has waited for the write already.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
            "stream": None,
        }


class DeviceArena:
    """Memory of one GPU, `device`, for tensors that others read.

    Attributes:
        handle: other processes open the memory by it.
        event_handles: other processes open its events by them.
        table: the slot of the words in `arena`.
    """

    def __init__(
        self, arena: Arena, driver: Driver, *, device: int, total_bytes: int, pin: bool = True
    ) -> None:
        """Allocate the memory. With `pin`, also make the host arena resident and pin it, for faster copies.

        Raises:
            CapacityError: the GPU has not that much memory, or the arena no room for the words.
            OSError: CUDA exports no handles to other processes here.
        """
        self.arena = arena
        self.driver = driver
        self.device = device
        self._blocks = FreePages(pages_of(total_bytes))
        self.total_bytes: Final = self._blocks.total * PAGE
        self._lock = threading.Lock()
        self._slots: dict[int, Locator] = {}
        self._is_closed = False
        self._generations = itertools.count(secrets.randbits(62))
        self.table: Final = arena.allocate(self._blocks.total * PAIR_BYTES)
        self._words = arena.look(self.table, writable=True).view(np.uint64)
        self._words[:] = 0
        driver.setDevice(device)
        try:
            self._base = driver.malloc(self.total_bytes)
        except driver.CUDARuntimeError as error:
            arena.free(self.table.generation)
            raise CapacityError(
                f"GPU {device} has no {self.total_bytes} bytes for tensors: {error}"
            ) from error
        self._events: list[int] = []
        try:
            self.handle: Final = driver.ipcGetMemHandle(self._base)
            for _ in range(EVENTS):
                self._events.append(driver.eventCreateWithFlags(EVENT_FLAGS))
            self.event_handles: Final = [driver.ipcGetEventHandle(event) for event in self._events]
        except driver.CUDARuntimeError as error:
            self._give_back()
            raise OSError(f"GPU {device} gives no handles for other processes: {error}") from error
        self._pinned = self._pin() if pin else 0

    def allocate(self, nbytes: int) -> tuple[Locator, DeviceBytes]:
        """Return a slot to compute into; call `written` before its locator is published.

        Raises:
            CapacityError: the arena is full.
        """
        pages = pages_of(nbytes)
        with self._lock:
            start = self._blocks.take(pages)
            if start is None:
                free = f"{self._blocks.free * PAGE} free of {self.total_bytes}"
                raise CapacityError(f"the GPU's arena is full: {nbytes} bytes do not fit among {free}")
            generation = next(self._generations)
            at = Locator(DEVICE_SEGMENT, start * PAGE, nbytes, generation, generation % EVENTS)
            self._slots[generation] = at
            self._words[2 * start + 1] = nbytes
            self._words[2 * start] = generation
        return at, DeviceBytes(self._base + at.offset, nbytes, self)

    def written(self, at: Locator, stream: int) -> None:
        """Record that the work launched on `stream` so far includes all writes to the slot."""
        self.driver.eventRecord(self._events[at.event], stream)

    def check(self, at: Locator) -> None:
        """Check that the slot is live.

        Raises:
            TensorGone: the slot was freed, or never existed.
        """
        with self._lock:
            if self._slots.get(at.generation) != at:
                raise TensorGone(f"slot {at.generation} of the GPU was freed, or never was")

    def look(self, at: Locator, stream: int) -> DeviceBytes:
        """Return an own slot's bytes, for work on `stream`.

        Raises:
            TensorGone: the slot was freed, or never existed.
        """
        self.check(at)
        self.driver.streamWaitEvent(stream, self._events[at.event])
        return DeviceBytes(self._base + at.offset, at.nbytes, self)

    def free(self, generation: int) -> bool:
        """Free a slot; return False if it is free already. Readers check it after their work has ended."""
        with self._lock:
            at = self._slots.pop(generation, None)
            if at is None:
                return False
            start = at.offset // PAGE
            self._words[2 * start] = 0
            self._words[2 * start + 1] = 0
            self._blocks.give(start, pages_of(at.nbytes))
            return True

    @property
    def free_bytes(self) -> int:
        return self._blocks.free * PAGE

    def close(self) -> None:
        """Release all memory; work on its slots must have ended before."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._words[:] = 0
            self._slots.clear()
        self.driver.setDevice(self.device)
        if self._pinned:
            self.driver.hostUnregister(self._pinned)
        self._give_back()

    def _give_back(self) -> None:
        for event in self._events:
            self.driver.eventDestroy(event)
        self._events.clear()
        self.driver.free(self._base)
        self.arena.free(self.table.generation)

    def _pin(self) -> int:
        base = int(np.frombuffer(self.arena.backing.memory, np.uint8).ctypes.data)
        try:
            self.arena.hold()
            self.driver.hostRegister(base, self.arena.layout.length, 0)
        except (OSError, self.driver.CUDARuntimeError) as error:
            _LOGGER.warning("data plane: the arena is not pinned, copies from the GPU are slower: %s", error)
            return 0
        return base
