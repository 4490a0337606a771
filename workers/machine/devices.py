"""The device that a rank computes on, and its memory. Asks torch only which GPUs this machine has."""

import os

import torch

from configs.deployment import ConfigError, DeploymentConfig
from workers.machine.gpu_index import gpu_index


def choose_device(config: DeploymentConfig, rank: int) -> torch.device:
    """Return a rank's device; `auto` gives each rank a GPU in turn, or the CPU without any.

    Raises:
        ConfigError: the configuration names a GPU that this machine does not have.
    """
    name = config.device_of(rank)
    where = f"devices.{rank}" if rank in config.devices else "model_kwargs.device"
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                f"{where} is 'mps', but torch has no Metal on this machine: expected a Mac with Apple "
                "silicon; use auto, cpu or cuda"
            )
        return torch.device("mps")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = gpu_index(name, rank, count)
    if index is None:
        return torch.device("cpu")
    if index >= count:
        raise ConfigError(f"{where} is {name!r}, but this machine has {count} GPUs")
    return torch.device("cuda", index)


def device_bytes(device: torch.device) -> int:
    """The memory of a device, in use or not; of a CPU that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
