"""The interface between the store and a transport."""

from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from workers.data_plane.port import Bytes

SEGMENT: Final = 0
"""The segment number of an arena in main memory."""
DEVICE_SEGMENT: Final = 1
"""The segment number of its twin on a GPU."""


class Locator(msgspec.Struct, frozen=True, array_like=True):
    """The position of a slot in its owner's arena; packed into a handle.

    Attributes:
        segment: the piece of the arena.
        offset: the tensor's first byte in it.
        nbytes: the tensor's length.
        generation: of the slot, never used twice; a different one there means that the tensor is gone.
        event: the interprocess event recorded after the last write of a GPU tensor; -1 without one.
    """

    segment: int
    offset: int
    nbytes: int
    generation: int
    event: int = -1


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker's incarnation, and its endpoint for one transport."""

    rank: int
    incarnation: int
    endpoint: bytes


class Transport(Protocol):
    """Access to other workers' arenas by one mechanism."""

    @property
    def name(self) -> str:
        """The key of its endpoint in `worker.joined`."""
        ...

    @property
    def refused(self) -> int:
        """The number of invalid requests received."""
        ...

    def endpoint(self) -> bytes:
        """Return the endpoint of this worker, MessagePack of a few hundred bytes; empty if it has none."""
        ...

    def reaches(self, peer: Peer) -> bool:
        """Return True if both endpoints suggest that the peer is reachable; does not contact the peer."""
        ...

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        """Return the bytes at `locator`: a read-only view of the peer's memory, or a copy.

        Raises:
            TensorGone: the tensor is gone, or the peer's incarnation has ended.
            TransportError: this transport does not work now; another one may.
        """
        ...

    def check(self, peer: Peer, locator: Locator) -> None:
        """Check that a view of `fetch` was still valid; a no-op for copies.

        Called from any thread, on every transport to a peer; one that gave no view of this peer does nothing.

        Raises:
            TensorGone: the slot was freed meanwhile.
        """
        ...

    def forget(self, peer: Peer) -> None:
        """Release everything of a peer whose incarnation has ended."""
        ...

    async def close(self) -> None: ...


class TransportError(Exception):
    """This transport does not reach a peer; the message gives the reason in one line."""
