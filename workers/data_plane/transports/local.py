"""Transport within one process, as in tests with several ranks: a view of the very slot."""

import weakref
from typing import Final

import msgspec

from shared.errors import TensorGone
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, Peer

_arenas: Final[weakref.WeakValueDictionary[int, Arena]] = weakref.WeakValueDictionary()
"""The arenas of this process, by epoch."""


class LocalTransport:
    """Finds a peer's arena among those of this process."""

    name: Final = "local"
    refused: Final = 0

    def __init__(self, arena: Arena) -> None:
        self._epoch = arena.layout.epoch
        _arenas[self._epoch] = arena

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(self._epoch)

    def reaches(self, peer: Peer) -> bool:
        return _arena(peer) is not None

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        arena = _arena(peer)
        if arena is None:
            raise TensorGone(f"rank {peer.rank} has closed its arena")
        return arena.look(locator)

    def check(self, peer: Peer, locator: Locator) -> None:
        if (arena := _arena(peer)) is not None:
            arena.check(locator)

    def forget(self, peer: Peer) -> None:
        """Nothing to release."""

    async def close(self) -> None:
        _arenas.pop(self._epoch, None)


def _arena(peer: Peer) -> Arena | None:
    try:
        return _arenas.get(msgspec.msgpack.decode(peer.endpoint, type=int))
    except msgspec.DecodeError:
        return None
