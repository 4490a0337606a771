"""The effective configuration of this process, from file, environment and flags.

A thin shell: it reads the sources, `dalsegno.config.layers` combines them.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from configs import files, nats_access, secrets
from configs.adapters import configured
from configs.deployment import ConfigError, DeploymentConfig, MediaSettings, NatsSettings, SealingSettings
from configs.files import Base
from dalsegno.config import address, environment, gguf_files, layers
from dalsegno.config.environment import Environment
from dalsegno.config.layers import Effective, Setting
from dalsegno.hub import fetching
from dalsegno.hub.listing import PUBLIC, Hub
from models import registry
from models.checkpoints import hub_cache
from models.checkpoints.files import context_length, read_language_config
from models.checkpoints.hub_cache import HubName
from shared.log.nats.permissions import PROVISIONER

FLAGS: Final = {
    "host": "gateway.host",
    "port": "gateway.port",
    "data_dir": "data_dir",
    "checkpoint": "checkpoint",
    "log_level": "logs.level",
    "log_format": "logs.format",
    "nats": "nats.url",
    "prefix": "nats.prefix",
    "durability": "nats.durability",
}
"""Flags for frequently used keys: `--log-level debug` means `--set logs.level=debug`."""

_IN_MAP: Final = re.compile(r"model_kwargs(?:: unknown key |\.)([^;:\s]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The location of a log, as far as it is known without a model. `data_dir` is absolute."""

    nats: NatsSettings
    media: MediaSettings
    data_dir: Path | None


def settings_of(*, set_: Sequence[str] = (), **flags: object) -> tuple[Setting, ...]:
    """Convert flags to settings. Flags of `FLAGS` override `--set`; a flag that is None is ignored.

    Raises:
        ConfigError: a key is unknown, or a value does not fit its key.
    """
    own = [
        layers.setting(FLAGS[name], str(value), f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    ]
    return (*map(layers.of_flag, set_), *own)


def effective(model: str, flags: Sequence[Setting], *, with_weights: bool = True) -> Effective:
    """The configuration of `model`: a name in `configs/`, a YAML or GGUF file, a folder, or on a hub.

    A GGUF file is converted once to a checkpoint folder in the user's caches. Of a model on a hub, its
    configuration is downloaded, and its weights unless `with_weights` is false.

    Raises:
        ConfigError: the configuration cannot be served; names origin, key, value and what was expected.
        HubError, HubUnavailableError: the model cannot be had from the hub.
    """
    around = environment.read()
    settings = [*layers.of_environment(around.settings), *flags]

    def fetch(name: HubName) -> Path:
        return fetching.fetch(name, hub_of(around), _say, with_weights=with_weights)

    def known(_: HubName) -> Path:
        return Path(pinned["checkpoint"])

    def convert(file: Path) -> Path:
        return gguf_files.converted(file, around.cache_home, _say)

    pinned = {one.key: str(one.value) for one in flags if one.key in {"model", "checkpoint"}}
    base = files.with_hub_model(files.read(model, fetch, convert), known if len(pinned) == 2 else fetch)
    return layers.effective(base, settings, Path.cwd(), around.hub_cache)


def pinned(found: Effective) -> tuple[Setting, ...]:
    """The settings that make other processes serve the same commit of a model on a hub, without asking it."""
    folder = Path(found.config.checkpoint)
    if hub_cache.origin(folder) is None:
        return ()
    return tuple(
        layers.setting(key, value, "the launcher")
        for key, value in (("model", found.config.model), ("checkpoint", str(folder)))
    )


def hub_of(around: Environment) -> Hub:
    """The hub of this process's environment, and its cache."""
    return Hub(
        cache=around.hub_cache.absolute(),
        endpoint=around.hub_endpoint or PUBLIC,
        token=around.hub_token,
        is_offline=around.hub_is_offline,
    )


def _say(sentence: str) -> None:
    """Tell the operator at once: log records are held back until the configuration is known."""
    print(sentence, file=sys.stderr, flush=True)


def of_values(values: dict[str, Any], name: str) -> Effective:
    """A configuration from known values, such as those in a data dir or a bundle.

    Raises:
        ConfigError: it cannot be served on this machine.
    """
    around = environment.read()
    base = Base(values=values, source="the recorded configuration", folder=Path.cwd(), name=name)
    return layers.effective(base, layers.of_environment(around.settings), Path.cwd(), around.hub_cache)


def reach(flags: Sequence[Setting]) -> Reach:
    """The location of the log, from environment and flags, for commands without a model.

    Raises:
        ConfigError: a variable is unknown, or its value does not fit.
    """
    empty = Base(values={}, source="", folder=Path.cwd(), name="")
    values, _ = layers.overlay(empty, [*_of_environment(), *flags], Path.cwd())
    data_dir = values.get("data_dir")
    return Reach(
        nats=msgspec.convert(values.get("nats", {}), NatsSettings),
        media=msgspec.convert(values.get("media", {}), MediaSettings),
        data_dir=Path(data_dir) if data_dir is not None else None,
    )


def sealing(flags: Sequence[Setting] = ()) -> SealingSettings:
    """The settings of seals, from environment and flags, for commands without a model.

    Raises:
        ConfigError: a variable is unknown, or its value does not fit.
    """
    empty = Base(values={}, source="", folder=Path.cwd(), name="")
    values, _ = layers.overlay(empty, [*_of_environment(), *flags], Path.cwd())
    return msgspec.convert(values.get("sealing", {}), SealingSettings)


def check(found: Effective) -> None:
    """Check what single roles would check later: the family's settings, files, addresses.

    Raises:
        ConfigError, AddressError, CheckpointError: a role would refuse the configuration.
    """
    from workers import settings

    config = found.config
    try:
        settings.of(config)
    except ConfigError as error:
        at = _IN_MAP.match(error.message)
        whole = found.sources["model_kwargs"]
        source = found.sources.get(f"model_kwargs.{at[1]}", whole) if at else whole
        raise ConfigError(f"{source}: {error.message}") from error
    for name in sorted(registry.graph(config.model).paths & config.model_kwargs.keys()):
        if not Path(str(config.model_kwargs[name])).exists():
            source = found.sources[f"model_kwargs.{name}"]
            raise ConfigError(f"{source}: model_kwargs.{name}: {config.model_kwargs[name]} does not exist")
    if (remarks := registry.graph(config.model).remarks) is not None:
        remarks(Path(config.checkpoint), config.model_kwargs)
    configured(config)
    _check_length(found)
    secrets.api_keys(config.gateway)
    nats_access.nats_credentials(config.nats, PROVISIONER).tls()
    if config.nats.url is not None:
        address.nats_url(config.nats.url)


def _check_length(found: Effective) -> None:
    config = found.config
    if not registry.graph(config.model).states_length:
        return  # the node says it when it is examined
    length = context_length(read_language_config(Path(config.checkpoint)))
    if length is not None and config.max_seq_len > length:
        raise ConfigError(
            f"{found.sources['max_seq_len']}: max_seq_len is {config.max_seq_len}, but the model in "
            f"{config.checkpoint} was made for {length} tokens; set max_seq_len to at most that"
        )


def nats_url(config: DeploymentConfig) -> str:
    """The address of the NATS server that a role joins.

    Raises:
        ConfigError: no address is configured.
        AddressError: the address is invalid, or contains a secret.
    """
    if config.nats.url is None:
        raise ConfigError(
            "a role joins a NATS server: name it with --nats nats://host:port, "
            f"{layers.KEYS['nats.url'].variable}, or nats.url in the YAML file"
        )
    return address.nats_url(config.nats.url)


def _of_environment() -> list[Setting]:
    return layers.of_environment(environment.read().settings)
