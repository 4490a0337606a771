"""The nodes that a rank hosts, and its share of the device it computes on.

The ranks of a device are read from the configuration, as if all ranks were on this machine. So two ranks of
one device leave each other room in its memory and on its cores.
"""

from dataclasses import dataclass

import torch

from configs.deployment import DeploymentConfig
from models import registry
from models.base import EngineKind
from workers.machine.cores import cores
from workers.machine.devices import choose_device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """A rank's device, and the ranks it shares the device with.

    Attributes:
        other_ranks: the other ranks that compute on the device.
        kv_pools: the number of KV pools on the device, those of this rank included.
    """

    device: torch.device
    other_ranks: tuple[int, ...]
    kv_pools: int

    @property
    def cores(self) -> int:
        """This rank's share of the machine's cores, at least one."""
        return max(1, cores() // (len(self.other_ranks) + 1))

    def __str__(self) -> str:
        if not self.other_ranks:
            return str(self.device)
        others = ", ".join(map(str, self.other_ranks))
        return f"{self.device}, shared with rank{'s' if len(self.other_ranks) > 1 else ''} {others}"


def of(config: DeploymentConfig, rank: int) -> DeviceShare:
    """Return the device of `rank` and the ranks it shares it with.

    Raises:
        ConfigError: the configuration names a GPU that this machine does not have.
    """
    device = choose_device(config, rank)
    kinds = {other: _kinds_of(config, other) - {EngineKind.CPU} for other in config.ranks}
    on_device = [
        other
        for other in config.ranks
        if kinds[other] and (other == rank or choose_device(config, other) == device)
    ]
    return DeviceShare(
        device=device,
        other_ranks=tuple(other for other in on_device if other != rank),
        kv_pools=sum(len(nodes_of(config, other, EngineKind.KV)) for other in on_device),
    )


def nodes_of(config: DeploymentConfig, rank: int, kind: EngineKind) -> list[str]:
    """Return the nodes of a kind that a rank hosts."""
    nodes = registry.graph(config.model).nodes
    return [node for node in config.nodes_of(rank) if nodes[node] is kind]


def _kinds_of(config: DeploymentConfig, rank: int) -> set[EngineKind]:
    nodes = registry.graph(config.model).nodes
    return {nodes[node] for node in config.nodes_of(rank)}
