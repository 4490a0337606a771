"""What a rank computes on. Of torch it needs no more than which GPUs there are."""

import torch

from configs.deployment import ConfigError, DeploymentConfig


def choose_device(config: DeploymentConfig, rank: int) -> torch.device:
    """A rank's device; `auto` gives each rank its own GPU, as far as there are any.

    Raises:
        ConfigError: a GPU that is not there.
    """
    name = config.device_of(rank)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", rank % count) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        where = f"devices.{rank}" if rank in config.devices else "model_kwargs.device"
        raise ConfigError(f"{where} is {name!r}, but this machine has {count} GPUs")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
