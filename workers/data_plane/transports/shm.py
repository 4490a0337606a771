"""Shared memory without a name: a peer's arena is a descriptor of its process, `/proc/<pid>/fd/<n>`.

That takes the same kernel, the same sight of processes and the same user, which the cards say.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.backing import MEMFD_NAME
from workers.data_plane.transport import Peer, TransportError
from workers.data_plane.transports.endpoints import boot, read_card
from workers.data_plane.transports.mapped import OPEN_FLAGS, MappedTransport


class ShmCard(msgspec.Struct, frozen=True, array_like=True):
    """How an arena without a name is opened.

    Attributes:
        boot: of the kernel.
        namespace: in which the process id counts.
        user: who may open it.
        epoch: of the arena.
    """

    boot: str
    namespace: int
    user: int
    pid: int
    descriptor: int
    epoch: int


class ShmTransport(MappedTransport):
    """Opens peers' descriptors."""

    name: Final = "shm"

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._own = ShmCard(
            boot=boot(),
            namespace=Path("/proc/self/ns/pid").stat().st_ino,
            user=os.geteuid(),
            pid=os.getpid(),
            descriptor=arena.backing.fd,
            epoch=arena.layout.epoch,
        )

    def card(self) -> bytes:
        return msgspec.msgpack.encode(self._own)

    def reaches(self, peer: Peer) -> bool:
        card = read_card(peer.card, ShmCard)
        return card is not None and _home(card) == _home(self._own)

    def open(self, peer: Peer) -> tuple[int, int]:
        card = read_card(peer.card, ShmCard)
        if card is None:
            raise TransportError(f"rank {peer.rank}: its card cannot be read")
        path = Path(f"/proc/{card.pid}/fd/{card.descriptor}")
        # Looked at before it is opened: of a process that has got a dead one's id nothing is touched.
        target = str(path.readlink())
        if MEMFD_NAME not in target:
            raise TransportError(f"rank {peer.rank}: {path} is {target!r}, and no arena")
        return os.open(path, OPEN_FLAGS), card.epoch


def _home(card: ShmCard) -> tuple[str, int, int]:
    return card.boot, card.namespace, card.user
