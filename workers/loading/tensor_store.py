"""The tensor store of a rank, opened as the configuration says. No torch."""

import errno
import socket
from typing import Final

from configs.deployment import ConfigError, DeploymentConfig
from models import registry
from models.base import EngineKind
from shared.errors import CapacityError
from workers.data_plane.assembly import GpuArenaSize, ListenAddress, make_transports
from workers.data_plane.memory.cuda_driver import find_driver
from workers.data_plane.store import ArenaStore, open_store
from workers.machine.gpu_index import gpu_index

GPU_ARENA_BYTES: Final = 256 << 20
"""The most GPU memory for tensors that other ranks read; what does not fit is published in main memory."""


def open_tensors(config: DeploymentConfig, rank: int) -> ArenaStore:
    """Open the store of a rank. In a deployment of one rank it does not listen.

    Raises:
        ConfigError: the address is not one of this machine.
        CapacityError: the port is taken, or there is no memory; a later attempt may succeed.
    """
    plane = config.data_plane
    listen = ListenAddress.of_rank(rank, plane.address, plane.port)
    is_alone = len(config.leaders) == 1
    transports = make_transports(
        ["local"] if is_alone else plane.transports, listen, None if is_alone else _gpu_arena(config, rank)
    )
    try:
        return open_store(total_bytes=plane.arena_bytes, transports=transports, memory=plane.memory)
    except (OSError, ValueError) as error:
        asked = f"address {listen.address}, port {listen.port}, arena_bytes {plane.arena_bytes}"
        is_permanent = isinstance(error, ValueError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        kind = ConfigError if is_permanent else CapacityError
        raise kind(f"the data plane of rank {rank} ({asked}) cannot be opened: {error}") from error


def _gpu_arena(config: DeploymentConfig, rank: int) -> GpuArenaSize | None:
    """Return the arena on the rank's GPU; None if it computes on the CPU, or hosts nothing that computes."""
    if config.device_of(rank) == "cpu" or (driver := find_driver()) is None:
        return None
    nodes = registry.graph(config.model).nodes
    device = gpu_index(config.device_of(rank), rank, driver.getDeviceCount())
    if device is None or all(nodes[node] is EngineKind.CPU for node in config.nodes_of(rank)):
        return None
    return GpuArenaSize(device, min(GPU_ARENA_BYTES, config.data_plane.arena_bytes))
