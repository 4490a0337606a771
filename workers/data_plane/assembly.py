"""Which ways to other workers there are, in the order in which they are tried: the cheapest first.

A configuration says which may be taken (`data_plane.transports`), not in which order: that follows from what
they cost. Of two workers each takes the first of its ways that the other has a endpoint for and that reaches.

    local      in this process        the very slot
    cuda_ipc   GPUs of one machine    a view of the other's memory; only for a worker that keeps tensors there
    shm        one machine            a view of the other's arena: by its process, or by a name in /dev/shm
    nixl       an RDMA network        a copy, made by the network card; only where it is asked for
    tcp        any network            a copy
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.cuda_driver import find_driver
from workers.data_plane.memory.device_arena import DeviceArena
from workers.data_plane.store import MakeTransport
from workers.data_plane.transport import Transport
from workers.data_plane.transports.cuda_ipc import CudaIpcTransport
from workers.data_plane.transports.fetch_buffers import ArenaFetchBuffers
from workers.data_plane.transports.local import LocalTransport
from workers.data_plane.transports.nixl import NixlTransport
from workers.data_plane.transports.shm import ShmTransport
from workers.data_plane.transports.shm_named import NamedShmTransport
from workers.data_plane.transports.tcp import TcpTransport

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where this worker meets others.

    Attributes:
        address: the one it listens at, and nowhere else.
        port: 0 is any free one.
    """

    address: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of_rank(cls, rank: int, address: str, port: int) -> "ListenAddress":
        """As it is configured once for all ranks: several on one machine listen at ports side by side."""
        return cls(address, port + rank if port else 0)


@dataclass(frozen=True, slots=True)
class GpuArenaSize:
    """A GPU of which a part is for tensors that others read.

    Attributes:
        device: its number in this process.
        total_bytes: of that part, taken at the start.
    """

    device: int
    total_bytes: int


def make_transports(
    names: Iterable[str], network: ListenAddress, gpu: GpuArenaSize | None = None
) -> list[MakeTransport]:
    """The ways of these names, as `open_store` takes them; without `gpu`, or CUDA, there is no `cuda_ipc`.

    Raises:
        ValueError: a name that is none of `NAMES`.
    """
    asked = set(names)
    if unknown := asked - set(NAMES):
        raise ValueError(f"no such transport: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return [make for name in NAMES if name in asked for make in _WAYS[name](network, gpu)]


def _cuda_ipc(network: ListenAddress, gpu: GpuArenaSize | None) -> list[MakeTransport]:
    driver = find_driver() if gpu is not None else None
    if gpu is None or driver is None:
        why = "this worker keeps no tensors on a GPU" if gpu is None else "no GPU here, or no `dalsegno[gpu]`"
        _LOGGER.info("data plane: no cuda_ipc: %s", why)
        return []

    def make(arena: Arena) -> Transport:
        own = DeviceArena(arena, driver, device=gpu.device, total_bytes=gpu.total_bytes)
        return CudaIpcTransport(own, ArenaFetchBuffers(arena))

    return [make]


def _tcp(network: ListenAddress, gpu: GpuArenaSize | None) -> list[MakeTransport]:
    def make(arena: Arena) -> Transport:
        return TcpTransport(arena, ArenaFetchBuffers(arena), address=network.address, port=network.port)

    return [make]


def _nixl(network: ListenAddress, gpu: GpuArenaSize | None) -> list[MakeTransport]:
    return [lambda arena: NixlTransport(arena, address=network.address)]


_WAYS: Final[dict[str, Callable[[ListenAddress, GpuArenaSize | None], list[MakeTransport]]]] = {
    "local": lambda _network, _gpu: [LocalTransport],
    "cuda_ipc": _cuda_ipc,
    "shm": lambda _network, _gpu: [ShmTransport, NamedShmTransport],
    "nixl": _nixl,
    "tcp": _tcp,
}
NAMES: Final = tuple(_WAYS)
"""The order in which they are tried."""
