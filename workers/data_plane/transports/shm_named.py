"""Shared memory with a name: a file in /dev/shm, for workers that do not share a process namespace.

Containers that share /dev/shm are an example. A file whose lock is not held belongs to a dead owner, and is
not read.
"""

import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shared.errors import TensorGone
from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.backing import is_abandoned
from workers.data_plane.transport import Peer, TransportError
from workers.data_plane.transports.endpoints import boot, decode_endpoint
from workers.data_plane.transports.mapped import OPEN_FLAGS, MappedTransport


class NamedShmEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint of an arena with a name.

    Attributes:
        boot: the boot id of the kernel that `device` belongs to.
        device: the file system.
        epoch: of the arena.
    """

    boot: str
    device: int
    path: Annotated[str, msgspec.Meta(pattern=r"^/[^\0]+$")]
    epoch: int


class NamedShmTransport(MappedTransport):
    """Opens peers' files. A worker whose arena has no name has no endpoint."""

    name: Final = "shm_named"

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._endpoint = b""
        if (path := arena.backing.path) is not None:
            endpoint = NamedShmEndpoint(boot(), path.stat().st_dev, str(path), arena.layout.epoch)
            self._endpoint = msgspec.msgpack.encode(endpoint)

    def endpoint(self) -> bytes:
        return self._endpoint

    def reaches(self, peer: Peer) -> bool:
        endpoint = decode_endpoint(peer.endpoint, NamedShmEndpoint)
        if endpoint is None or endpoint.boot != boot():
            return False
        try:
            return Path(endpoint.path).parent.stat().st_dev == endpoint.device
        except OSError:
            return False

    def open(self, peer: Peer) -> tuple[int, int]:
        endpoint = decode_endpoint(peer.endpoint, NamedShmEndpoint)
        if endpoint is None:
            raise TransportError(f"rank {peer.rank}: its endpoint cannot be decoded")
        fd = os.open(endpoint.path, OPEN_FLAGS | os.O_NOFOLLOW)
        try:
            if is_abandoned(fd):
                raise TensorGone(f"rank {peer.rank} is gone: the lock of {endpoint.path} is not held")
        except BaseException:
            os.close(fd)
            raise
        return fd, endpoint.epoch
