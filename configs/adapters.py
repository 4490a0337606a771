"""The LoRA adapters that a deployment's configuration names, checked and digested. No torch."""

from pathlib import Path

from configs.deployment import ConfigError, DeploymentConfig
from models.checkpoints.adapters import AdapterError, adapter_at
from shared.adapters import Adapter


def configured(config: DeploymentConfig) -> dict[str, Adapter]:
    """The adapters of `adapters` by name; reads all their bytes.

    Raises:
        ConfigError: one is missing, damaged, or not served.
    """
    try:
        return {name: adapter_at(name, Path(folder)) for name, folder in sorted(config.adapters.items())}
    except AdapterError as error:
        raise ConfigError(f"adapters: {error.message}") from error
