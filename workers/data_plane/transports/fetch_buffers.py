"""Where fetched tensors land: in this worker's own arena, which is warm, bounded, and known to network cards.

A landing is a slot that is freed at once. Nobody else has its handle, and its pages come home when the last
view of them is gone, also a view of a view, numpy's or torch's: whoever fetches gives nothing back.
"""

from typing import Protocol

from shared.errors import CapacityError
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import Bytes
from workers.data_plane.transport import TransportError


class FetchBuffers(Protocol):
    """Lends writable memory."""

    def take(self, nbytes: int) -> Bytes:
        """Memory of `nbytes`, with whatever was in it; nobody else's until its last view is gone.

        Raises:
            TransportError: there is no room for so much.
        """
        ...


class ArenaFetchBuffers:
    """Lends an arena's pages."""

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
