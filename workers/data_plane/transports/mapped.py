"""What the ways through shared memory have in common: a peer's arena is mapped once, at the first fetch.

Then a tensor is a view of it, at any size and without a word to the owner. An owner that died cannot be
opened any more; what was mapped before stays readable until the peer is forgotten, and its views beyond that.
"""

import abc
import os
from typing import Final

from shared.errors import TensorGone
from workers.data_plane.memory.reader import ArenaReader
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, Peer, TransportError

OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""What is opened may turn out to be anything: a pipe must not keep us waiting, nor a terminal become ours."""


class MappedTransport(abc.ABC):
    """Maps what `open` opens."""

    refused: Final = 0
    """Nobody asks an owner: the memory is there to be read, or is not."""

    def __init__(self) -> None:
        self._readers: dict[tuple[int, int], ArenaReader] = {}

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        reader = self._readers.get((peer.rank, peer.incarnation))
        if reader is None:
            try:
                reader = ArenaReader(*self.open(peer))
            except (FileNotFoundError, ProcessLookupError) as error:
                raise TensorGone(f"rank {peer.rank} is gone, and its memory with it: {error}") from error
            except OSError as error:
                raise TransportError(f"rank {peer.rank}: {error}") from error
            self._readers[peer.rank, peer.incarnation] = reader
        return reader.view(locator)

    def check(self, peer: Peer, locator: Locator) -> None:
        if (reader := self._readers.get((peer.rank, peer.incarnation))) is not None:
            reader.check(locator)

    def forget(self, peer: Peer) -> None:
        self._readers.pop((peer.rank, peer.incarnation), None)

    async def close(self) -> None:
        self._readers.clear()

    @abc.abstractmethod
    def open(self, peer: Peer) -> tuple[int, int]:
        """A descriptor of the peer's arena file, to be kept, and the epoch it is to have.

        Raises:
            TensorGone: the peer's arena is not there any more.
            TransportError: this way does not lead there.
            OSError: the same; a file that is not there is the former.
        """
