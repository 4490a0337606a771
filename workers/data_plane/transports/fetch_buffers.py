"""Buffers for fetched tensors, from this worker's own arena: resident, bounded, known to network cards.

A buffer is a slot that is freed at once. No other process has its handle, and its pages return to the arena
when the last view of them is gone, including numpy's or torch's views of a view. So a fetcher releases
nothing.
"""

from typing import Protocol

from shared.errors import CapacityError
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import Bytes
from workers.data_plane.transport import TransportError


class FetchBuffers(Protocol):
    """Provides writable memory."""

    def take(self, nbytes: int) -> Bytes:
        """Return `nbytes` of uninitialised memory, private until its last view is gone.

        Raises:
            TransportError: there is no room.
        """
        ...


class ArenaFetchBuffers:
    """Provides pages of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def take(self, nbytes: int) -> Bytes:
        try:
            slot = self._arena.allocate(nbytes)
        except CapacityError as error:
            raise TransportError(f"no room to fetch into: {error.message}") from error
        view = self._arena.look(slot, writable=True)
        self._arena.free(slot.generation)
        return view
