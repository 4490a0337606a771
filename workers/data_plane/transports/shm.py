"""Shared memory without a name: a peer's arena is a descriptor of its process, `/proc/<pid>/fd/<n>`.

Both processes need the same kernel, process namespace and user; the endpoints say so.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.backing import MEMFD_NAME
from workers.data_plane.transport import Peer, TransportError
from workers.data_plane.transports.endpoints import boot, decode_endpoint
from workers.data_plane.transports.mapped import OPEN_FLAGS, MappedTransport


class ShmEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint of an arena without a name.

    Attributes:
        boot: the kernel's boot id.
        namespace: the process namespace of `pid`.
        user: the user who may open it.
        epoch: of the arena.
    """

    boot: str
    namespace: int
    user: int
    pid: int
    descriptor: int
    epoch: int


class ShmTransport(MappedTransport):
    """Opens descriptors of peers' processes."""

    name: Final = "shm"

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._own = ShmEndpoint(
            boot=boot(),
            namespace=Path("/proc/self/ns/pid").stat().st_ino,
            user=os.geteuid(),
            pid=os.getpid(),
            descriptor=arena.backing.fd,
            epoch=arena.layout.epoch,
        )

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(self._own)

    def reaches(self, peer: Peer) -> bool:
        endpoint = decode_endpoint(peer.endpoint, ShmEndpoint)
        return endpoint is not None and _home(endpoint) == _home(self._own)

    def open(self, peer: Peer) -> tuple[int, int]:
        endpoint = decode_endpoint(peer.endpoint, ShmEndpoint)
        if endpoint is None:
            raise TransportError(f"rank {peer.rank}: its endpoint cannot be decoded")
        path = Path(f"/proc/{endpoint.pid}/fd/{endpoint.descriptor}")
        # Checked before opening: nothing is opened of a process that reuses a dead one's id.
        target = str(path.readlink())
        if MEMFD_NAME not in target:
            raise TransportError(f"rank {peer.rank}: {path} is {target!r}, not an arena")
        return os.open(path, OPEN_FLAGS), endpoint.epoch


def _home(endpoint: ShmEndpoint) -> tuple[str, int, int]:
    return endpoint.boot, endpoint.namespace, endpoint.user
