"""Common part of the shared-memory transports: a peer's arena is mapped once, at the first fetch.

After that, a tensor of any size is a view of the mapping, without a message to the owner. A dead owner's
arena cannot be opened any more. A mapping made before stays readable until the peer is forgotten, and its
views even longer.
"""

import abc
import os
from typing import Final

from shared.errors import TensorGone
from workers.data_plane.memory.reader import ArenaReader
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, Peer, TransportError

OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""The path may lead to any file: a pipe must not block, and a terminal must not become ours."""


class MappedTransport(abc.ABC):
    """Maps the files that `open` opens."""

    refused: Final = 0
    """Always 0: readers send no requests."""

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
        """Return a descriptor of the peer's arena file, which the caller closes, and its expected epoch.

        Raises:
            TensorGone: the peer's arena is gone.
            TransportError: this transport does not reach it.
            OSError: likewise; a missing file means that the arena is gone.
        """
