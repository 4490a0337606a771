"""The configuration as this process is told it: file, environment, flags, in this order; later ones win.

Thin: what is read here is laid over one another in `dalsegno.config.layers`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from configs import files, nats_access, secrets
from configs.deployment import ConfigError, DeploymentConfig, NatsSettings
from configs.files import Base
from dalsegno.config import address, environment, layers
from dalsegno.config.layers import Effective, Setting
from models import registry
from models.checkpoints.files import context_length, read_json
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
"""Flags of their own for keys that are said often; `--log-level debug` is `--set logs.level=debug`."""

_IN_MAP: Final = re.compile(r"model_kwargs(?:: unknown key |\.)([^;:\s]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a log is, as far as it is told without a model; `data_dir` is absolute."""

    nats: NatsSettings
    data_dir: Path | None


def settings_of(*, set_: Sequence[str] = (), **flags: object) -> tuple[Setting, ...]:
    """What the flags say, those of their own behind `--set`; a flag that is None says nothing.

    Raises:
        ConfigError: there is no such key, or its value is not what the key takes.
    """
    own = [
        layers.setting(FLAGS[name], str(value), f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    ]
    return (*map(layers.of_flag, set_), *own)


def effective(model: str, told: Sequence[Setting]) -> Effective:
    """The configuration of `model`: a name in `configs/`, a YAML file, or a checkpoint folder.

    Raises:
        ConfigError: it cannot be served; says source, key, value, and what would be right.
    """
    base, around = files.read(model), environment.read()
    settings = [*layers.of_environment(around.settings), *told]
    return layers.effective(base, settings, Path.cwd(), around.hub_cache)


def of_values(values: dict[str, Any], name: str) -> Effective:
    """A configuration that is known already, as a data dir or a bundle keeps it.

    Raises:
        ConfigError: it cannot be served here.
    """
    around = environment.read()
    base = Base(values=values, source="the configuration that was in force", folder=Path.cwd(), name=name)
    return layers.effective(base, layers.of_environment(around.settings), Path.cwd(), around.hub_cache)


def reach(told: Sequence[Setting]) -> Reach:
    """What environment and flags say of where the log is, for those who know no model.

    Raises:
        ConfigError: a variable is unknown, or has a value that cannot be.
    """
    nobody = Base(values={}, source="", folder=Path.cwd(), name="")
    values, _ = layers.overlay(nobody, [*_of_environment(), *told], Path.cwd())
    data_dir = values.get("data_dir")
    return Reach(
        nats=msgspec.convert(values.get("nats", {}), NatsSettings),
        data_dir=Path(data_dir) if data_dir is not None else None,
    )


def check(found: Effective) -> None:
    """Look at what is looked at by one role alone, and later: the family's settings, files, addresses.

    Raises:
        ConfigError, AddressError: a role would refuse it.
    """
    from workers import settings

    told = found.config
    try:
        settings.of(told)
    except ConfigError as error:
        at = _IN_MAP.match(error.message)
        whole = found.sources["model_kwargs"]
        source = found.sources.get(f"model_kwargs.{at[1]}", whole) if at else whole
        raise ConfigError(f"{source}: {error.message}") from error
    for name in sorted(registry.graph(told.model).paths & told.model_kwargs.keys()):
        if not Path(str(told.model_kwargs[name])).exists():
            source = found.sources[f"model_kwargs.{name}"]
            raise ConfigError(f"{source}: model_kwargs.{name}: {told.model_kwargs[name]} is not there")
    _check_length(found)
    secrets.api_keys(told.gateway)
    nats_access.nats_credentials(told.nats, PROVISIONER).tls()
    if told.nats.url is not None:
        address.nats_url(told.nats.url)


def _check_length(found: Effective) -> None:
    told = found.config
    length = context_length(read_json(Path(told.checkpoint) / "config.json"))
    if length is not None and told.max_seq_len > length:
        raise ConfigError(
            f"{found.sources['max_seq_len']}: max_seq_len is {told.max_seq_len}, but the model in "
            f"{told.checkpoint} was made for {length} tokens; set max_seq_len to at most that"
        )


def nats_url(told: DeploymentConfig) -> str:
    """The address of the server that a role joins.

    Raises:
        ConfigError: none is told.
        AddressError: it is none, or carries a secret.
    """
    if told.nats.url is None:
        raise ConfigError(
            "a role joins a NATS server: name it with --nats nats://host:port, "
            f"{layers.KEYS['nats.url'].variable}, or nats.url in the YAML file"
        )
    return address.nats_url(told.nats.url)


def _of_environment() -> list[Setting]:
    return layers.of_environment(environment.read().settings)
