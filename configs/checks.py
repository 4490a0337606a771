"""Checks of a configuration: unknown keys, wrong values, paths, devices and placement, each a clear error."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from configs import placement, published_keys, renamed_keys
from configs.deployment import (
    ENGINE_PATHS,
    MASK,
    NATS_FILES,
    SECRETS,
    SECTIONS,
    ConfigError,
    DeploymentConfig,
)  # fmt: skip
from configs.files import read
from configs.placement import NodeGroup, PlacementError
from configs.secrets import split_key
from models import registry
from models.base import ModelGraph
from models.checkpoints import hub_cache as hub
from models.checkpoints.files import has_config
from models.voices import MOST_CHARACTERS, is_voice_name
from shared.adapters import NAME_PATTERN
from shared.closest_match import closest_match
from shared.validation_errors import ValidationProblem, described, validation_problem

_LOGGER: Final = logging.getLogger(__name__)
_DEVICE: Final = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "*", "0"})  # noqa: S104 - refused


def resolve(model: str, hub_cache: Path | None = None) -> DeploymentConfig:
    """Read and check a name in `configs/`, a YAML file, or a checkpoint folder.

    `hub_cache` is the local cache of the Hugging Face hub, for files that name no checkpoint.

    Raises:
        ConfigError: `model` is none of these, or cannot be served.
    """
    base = read(model)
    return check(base.values, source=base.source, folder=base.folder, name=base.name, hub_cache=hub_cache)


def check(
    raw: Mapping[str, Any],
    *,
    source: str,
    folder: Path,
    name: str,
    sources: Mapping[str, str] | None = None,
    hub_cache: Path | None = None,
) -> DeploymentConfig:
    """Check raw keys and values; return the configuration with absolute paths.

    Args:
        raw: keys and values.
        source: their origin, for messages.
        folder: the folder that relative paths start from.
        name: the model's name, unless `raw` has one.
        sources: the origin of single keys (`gateway.port`) that are not from `source`.
        hub_cache: the local cache of the Hugging Face hub, searched if no checkpoint is named.

    Raises:
        ConfigError: the configuration cannot be served. The message names origin, key, value and what was
            expected.
        UnknownFamilyError: no family serves the model. Raised first: the family defines some of the keys.
    """
    origins = _Origins(source, sources or {})
    raw = {key: value for key, value in raw.items() if value is not None or key not in SECTIONS}
    graph = _graph(raw.get("model"), origins)
    raw = _without_counterparts(_with_current_names(raw, graph, origins), origins)
    _refuse_unknown_in(raw, origins)
    _check_devices(raw.get("devices"), origins)
    try:
        config = msgspec.convert(raw, DeploymentConfig, str_keys=True)  # a rank in `devices` may be "0"
    except msgspec.ValidationError as error:
        found = validation_problem(error, raw, DeploymentConfig)
        raise ConfigError(f"{origins.of(found.place)}: {discreet(found)}") from error
    assert graph is not None  # a `model` that is not a string does not convert
    config = _with_paths(_with_checkpoint(config, graph, hub_cache, origins), graph, folder, origins)
    config = msgspec.structs.replace(config, name=config.name or name)
    if not _has_config(Path(config.checkpoint)):
        what = "has no config.json" if os.path.lexists(config.checkpoint) else "does not exist"
        raise ConfigError(f"{origins.of('checkpoint')}: checkpoint {config.checkpoint} {what}")
    for key, secret in (
        ("gateway.api_keys", config.gateway.api_keys),
        ("nats.password", [config.nats.password]),
        ("nats.seed", [config.nats.seed]),
        ("nats.token", [config.nats.token]),
    ):
        if any(one is not None and split_key(one)[1] == MASK for one in secret):
            raise ConfigError(
                f"{origins.of(key)}: {key}: {MASK} stands for a secret that was not printed; "
                "set it by environment variable, or in a file of secrets"
            )
    _check_placement(config, graph, origins)
    _check_voices(config, graph, origins)
    _check_adapters(config, graph, origins)
    if unknown := sorted(config.walk_timeouts_s.keys() - graph.walks.keys()):
        meant = closest_match(unknown[0], graph.walks)
        raise ConfigError(
            f"{origins.of('walk_timeouts_s')}: walk_timeouts_s: expected walks of {config.model} "
            f"({', '.join(sorted(graph.walks))}), found {unknown[0][:80]!r}"
            + (f"; did you mean {meant!r}?" if meant else "")
        )
    if config.nats.durability == "cluster" and config.nats.url is None:
        raise ConfigError(
            f"{origins.of('nats.durability')}: nats.durability: expected host or process for a "
            "private server, found cluster; name the servers of a NATS cluster with --nats or nats.url"
        )
    if config.data_plane.address in _EVERYWHERE:
        raise ConfigError(
            f"{origins.of('data_plane.address')}: data_plane.address: expected one address of this machine, "
            f"the one that other workers reach; found {config.data_plane.address!r}, which is all addresses"
        )
    return config


def _check_voices(config: DeploymentConfig, graph: ModelGraph, origins: "_Origins") -> None:
    """Refuse voices of a model that does not speak, and names that a prompt cannot have."""
    where = f"{origins.of('voices')}: voices"
    if config.voices and not graph.voices:
        raise ConfigError(f"{where}: expected none, because {config.model} has no voices; leave the key out")
    for name in config.voices:
        if not is_voice_name(name):
            raise ConfigError(
                f"{where}: expected names of 1 to {MOST_CHARACTERS} letters, digits, _ and -, "
                f"found {described(name)}"
            )


def _check_adapters(config: DeploymentConfig, graph: ModelGraph, origins: "_Origins") -> None:
    """Refuse adapters of a family, or on a placement, that does not take them."""
    if not config.takes_adapters:
        return
    where = f"{origins.of('adapters')}: adapters"
    if not graph.takes_adapters:
        raise ConfigError(f"{where}: expected none, because {config.model} takes no LoRA adapters")
    for name in config.adapters:
        if not re.match(NAME_PATTERN, name):
            raise ConfigError(
                f"{where}: expected names of 1 to 64 letters, digits, _ and -, found {described(name)}"
            )
    if any(len(config.tp_group_of(rank)) > 1 for rank in config.ranks):
        raise ConfigError(f"{where}: expected none with tp_size above 1: shared layers take no LoRA adapters")


def _graph(family: object, origins: "_Origins") -> ModelGraph | None:
    if not isinstance(family, str):
        return None
    try:
        return registry.graph(family)
    except registry.UnknownFamilyError as error:
        raise registry.UnknownFamilyError(f"{origins.of('model')}: {error.message}") from error


def _with_current_names(
    raw: Mapping[str, Any], graph: ModelGraph | None, origins: "_Origins"
) -> Mapping[str, Any]:
    """Return `raw` with the current names of the keys in `model_kwargs`; log a warning for each old name.

    Raises:
        ConfigError: a key is given by its old and its current name.
    """
    kwargs = raw.get("model_kwargs")
    if not isinstance(kwargs, dict):
        return raw
    try:
        current, renamed = renamed_keys.with_current_names(kwargs, graph.kwargs if graph is not None else ())
    except ValueError as error:
        raise ConfigError(f"{origins.of('model_kwargs')}: model_kwargs: {error}") from error
    for old, new in renamed.items():
        _LOGGER.warning("%s: %s", origins.of(f"model_kwargs.{old}"), renamed_keys.warning(old, new))
    return {**raw, "model_kwargs": current}


def _without_counterparts(raw: Mapping[str, Any], origins: "_Origins") -> Mapping[str, Any]:
    """Return `raw` without the published keys that have no counterpart; log a warning for each."""
    kept, left_out = published_keys.without_counterparts(raw)
    for key, why in left_out.items():
        _LOGGER.warning("%s: %s has no effect: %s", origins.of(key.partition(".")[0]), key, why)
    return kept


def _with_checkpoint(
    config: DeploymentConfig, graph: ModelGraph, hub_cache: Path | None, origins: "_Origins"
) -> DeploymentConfig:
    """Fill in the checkpoint: the configured folder, otherwise the family's repository in the hub cache."""
    if config.checkpoint:
        return config
    advice = "name a folder in the key checkpoint, or with --checkpoint"
    if not graph.repository:
        raise ConfigError(
            f"{origins.of('checkpoint')}: checkpoint: expected a folder, found nothing; {advice}"
        )
    found = hub.snapshot(hub_cache, graph.repository) if hub_cache is not None else None
    if found is None:
        where = f" in {hub_cache}" if hub_cache is not None else ""
        raise ConfigError(
            f"{origins.of('checkpoint')}: no checkpoint is named, and {graph.repository} was not downloaded: "
            f"not found{where}; get it with `hf download {graph.repository}`, or {advice}"
        )
    return msgspec.structs.replace(config, checkpoint=str(found))


def discreet(found: ValidationProblem) -> str:
    """The message of a validation error, without the value if that is a secret."""
    key = found.place.partition("[")[0]
    if key not in SECRETS:
        return found.message
    return f"{found.place}: {found.problem.partition(', found')[0]}, found a value of another kind"


def refuse_unknown(found: Mapping[str, Any], known_by: type[msgspec.Struct], where: str) -> None:
    """Refuse keys that the struct does not have, and name the closest match, which msgspec does not.

    Raises:
        ConfigError: a key is unknown.
    """
    known = {field.name: field.name for field in msgspec.structs.fields(known_by)}
    for key in found:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key}; {hint_for(str(key), known)}")


def hint_for(word: str, known: Mapping[str, str], listed: Iterable[str] | None = None) -> str:
    """A hint for an unknown word: the closest known one, or the list of all."""
    near = closest_match(word, known)
    return f"did you mean {known[near]!r}?" if near else f"expected one of {list(listed or known.values())}"


@dataclass(frozen=True, slots=True)
class _Origins:
    """The origins of values: a file, except for those set by environment variables or flags."""

    file: str
    others: Mapping[str, str]

    def of(self, place: str) -> str:
        key = place.partition("[")[0]
        while key and key not in self.others:
            key = key.rpartition(".")[0]
        return self.others.get(key, self.file)


def _refuse_unknown_in(raw: Mapping[str, Any], origins: _Origins) -> None:
    top = {field.name: field.name for field in msgspec.structs.fields(DeploymentConfig)}
    inner = {
        field.name: f"{section}.{field.name}"
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    }
    for key in raw:
        if key not in top:
            raise ConfigError(
                f"{origins.file}: unknown key {key}; {hint_for(str(key), inner | top, listed=top)}"
            )
    for section, kind in SECTIONS.items():
        if isinstance(values := raw.get(section), dict):
            refuse_unknown(values, kind, f"{origins.file}: {section}")
    groups = raw.get("node_groups")
    for number, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, dict):
            refuse_unknown(group, NodeGroup, f"{origins.of('node_groups')}: node_groups[{number}]")


def _with_paths(
    config: DeploymentConfig, graph: ModelGraph, folder: Path, origins: _Origins
) -> DeploymentConfig:
    """Make the paths of a configuration absolute (`paths`)."""

    def absolute(key: str, path: str) -> str:
        try:
            return str((folder / Path(path).expanduser()).resolve())
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, no home, a null byte
            raise ConfigError(f"{origins.of(key)}: {key}: {path!r} is not a usable path: {error}") from error

    def absolute_if_given(key: str, path: str | None) -> str | None:
        return absolute(key, path) if path is not None else None

    keys_file = absolute_if_given("gateway.api_keys_file", config.gateway.api_keys_file)
    nats_files = {name: absolute_if_given(f"nats.{name}", getattr(config.nats, name)) for name in NATS_FILES}
    own = {
        name: absolute(f"model_kwargs.{name}", value)
        for name, value in config.model_kwargs.items()
        if name in (*graph.paths, *ENGINE_PATHS) and isinstance(value, str)
    }
    adapters = {name: absolute(f"adapters.{name}", path) for name, path in config.adapters.items()}
    return msgspec.structs.replace(
        config,
        adapters=adapters,
        model_kwargs=config.model_kwargs | own,
        checkpoint=absolute("checkpoint", config.checkpoint),
        data_dir=absolute_if_given("data_dir", config.data_dir),
        gateway=msgspec.structs.replace(config.gateway, api_keys_file=keys_file),
        nats=msgspec.structs.replace(config.nats, **nats_files),
    )


def _has_config(folder: Path) -> bool:
    try:
        return has_config(folder)
    except OSError:  # the name is too long, or the folder is not readable
        return False


def _check_devices(devices: object, origins: "_Origins") -> None:
    """Check the map of devices; errors name the rank."""
    for rank, device in devices.items() if isinstance(devices, dict) else ():
        where = f"{origins.of(f'devices.{rank}')}: devices.{rank}"
        if not str(rank).isdecimal():
            raise ConfigError(f"{where}: expected a rank, an integer >= 0, found {described(rank)}")
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise ConfigError(f"{where}: expected auto, cpu, mps, cuda or cuda:N, found {described(device)}")


def _check_placement(config: DeploymentConfig, graph: ModelGraph, origins: "_Origins") -> None:
    try:
        ranks = placement.ranks_of(placement.resolve(config.node_groups, graph))
    except PlacementError as error:
        raise ConfigError(f"{origins.of('node_groups')}: {error}") from error
    if strangers := sorted(set(config.devices) - set(ranks)):
        raise ConfigError(
            f"{origins.of('devices')}: devices: expected ranks of node_groups, which are {ranks}, "
            f"found {strangers}"
        )
    if len(ranks) > 1 and set(config.data_plane.transports) == {"local"}:
        raise ConfigError(
            f"{origins.of('data_plane.transports')}: data_plane.transports: expected a transport "
            f"between processes, such as shm or tcp, for the ranks {ranks}; found only local"
        )
