"""The transports of a worker, in the order in which they are tried: the cheapest first.

The configuration says which transports may be used (`data_plane.transports`). Their order follows from their
cost. A worker uses, for each other worker, the first of its transports that the other one has an endpoint for
and that reaches.

    local      in this process        the very slot
    cuda_ipc   GPUs of one machine    tensors of the GPU alone: a view of the other's GPU memory
    shm        one machine            a view of the other's arena: by its process, or by a name in /dev/shm
    nixl       an RDMA network        a copy, made by the network card; only if configured
    tcp        any network            a copy
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from shared.errors import CapacityError
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
    """The address that this worker listens at for other workers.

    Attributes:
        address: one address of this machine.
        port: the port; 0 is any free one.
    """

    address: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of_rank(cls, rank: int, address: str, port: int) -> "ListenAddress":
        """Return the address of `rank`: the configured port is rank 0's, the next one rank 1's, and so on."""
        return cls(address, port + rank if port else 0)


@dataclass(frozen=True, slots=True)
class GpuArenaSize:
    """The part of a GPU's memory for tensors that other ranks read.

    Attributes:
        device: the GPU's number in this process.
        total_bytes: the size, allocated at start.
    """

    device: int
    total_bytes: int


def make_transports(
    names: Iterable[str], listen: ListenAddress, gpu: GpuArenaSize | None = None
) -> list[MakeTransport]:
    """Return the transports of these names, for `open_store`.

    A `cuda_ipc` that is named is left out without `gpu` or CUDA, with a line in the log. With `gpu`, `shm`
    brings `cuda_ipc` along, without a word where there is no CUDA.

    Raises:
        ValueError: a name that is not in `NAMES`.
    """
    asked = set(names)
    if unknown := asked - set(NAMES):
        raise ValueError(f"no such transport: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    is_named = "cuda_ipc" in asked
    if gpu is not None and "shm" in asked:
        asked.add("cuda_ipc")
    level = logging.INFO if is_named else logging.DEBUG
    return [
        make
        for name in NAMES
        if name in asked
        for make in (_cuda_ipc(gpu, level) if name == "cuda_ipc" else _FACTORIES[name](listen))
    ]


def _cuda_ipc(gpu: GpuArenaSize | None, level: int) -> list[MakeTransport]:
    driver = find_driver() if gpu is not None else None
    if gpu is None or driver is None:
        why = "this worker keeps no tensors on a GPU" if gpu is None else "no GPU here, or no `dalsegno[gpu]`"
        _LOGGER.log(level, "data plane: no cuda_ipc: %s", why)
        return []

    def make(arena: Arena) -> Transport | None:
        try:
            own = DeviceArena(arena, driver, device=gpu.device, total_bytes=gpu.total_bytes, pin=False)
        except (CapacityError, OSError) as error:
            _LOGGER.warning("data plane: no cuda_ipc: %s", error)
            return None
        return CudaIpcTransport(own, ArenaFetchBuffers(arena))

    return [make]


def _tcp(listen: ListenAddress) -> list[MakeTransport]:
    def make(arena: Arena) -> Transport:
        return TcpTransport(arena, ArenaFetchBuffers(arena), address=listen.address, port=listen.port)

    return [make]


def _nixl(listen: ListenAddress) -> list[MakeTransport]:
    return [lambda arena: NixlTransport(arena, address=listen.address)]


_FACTORIES: Final[dict[str, Callable[[ListenAddress], list[MakeTransport]]]] = {
    "local": lambda _: [LocalTransport],
    "shm": lambda _: [ShmTransport, NamedShmTransport],
    "nixl": _nixl,
    "tcp": _tcp,
}
NAMES: Final = ("local", "cuda_ipc", "shm", "nixl", "tcp")
"""All transports, in the order in which they are tried."""
