"""What the store asks of a transport."""

from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from workers.data_plane.port import Bytes

SEGMENT: Final = 0
"""Of an arena in main memory, in a locator; it has one."""
DEVICE_SEGMENT: Final = 1
"""Of its twin on a GPU."""


class Locator(msgspec.Struct, frozen=True, array_like=True):
    """Where a slot is in its owner's arena; a handle carries it packed.

    Attributes:
        segment: which piece of the arena.
        offset: of the first byte of the tensor in it.
        nbytes: the tensor's length.
        generation: of the slot, never used twice; another one there means that the tensor is gone.
        event: of a tensor on a GPU, the interprocess event behind its last write; -1 where there is none.
    """

    segment: int
    offset: int
    nbytes: int
    generation: int
    event: int = -1


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker's life, and how this transport reaches it."""

    rank: int
    incarnation: int
    endpoint: bytes


class Transport(Protocol):
    """One way to another worker's arena."""

    @property
    def name(self) -> str:
        """Of its endpoint in `worker.joined`."""
        ...

    @property
    def refused(self) -> int:
        """How many requests that came this way nobody of ours would have sent."""
        ...

    def endpoint(self) -> bytes:
        """How others reach this worker; MessagePack, a few hundred bytes. Empty: not this way."""
        ...

    def reaches(self, peer: Peer) -> bool:
        """Whether it is worth trying: by what both endpoints say, without asking the peer."""
        ...

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        """The bytes at `locator`: a read-only view of the peer's memory, or a copy.

        Raises:
            TensorGone: the peer says that they are not there, or its life is over.
            TransportError: this way does not work now; another may.
        """
        ...

    def check(self, peer: Peer, locator: Locator) -> None:
        """Whether a view of `fetch` still shows those bytes; for a copy there is nothing to ask.

        Asked of every way to a peer: one that has given no view of this peer says nothing. From any thread.

        Raises:
            TensorGone: the slot was freed meanwhile.
        """
        ...

    def forget(self, peer: Peer) -> None:
        """The peer's life is over: let go of everything of it."""
        ...

    async def close(self) -> None: ...


class TransportError(Exception):
    """This way to a peer does not work; says why, in one line."""
