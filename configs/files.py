"""Sources of a configuration: a name in `configs/`, a YAML file, or a checkpoint folder. Not checked yet."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from configs.deployment import ConfigError
from models import registry
from models.checkpoints import hub_cache
from models.checkpoints.files import context_length, read_language_config
from models.checkpoints.hub_cache import HubName
from shared.closest_match import closest_match
from shared.validation_errors import described

_LOGGER: Final = logging.getLogger(__name__)
_GGUF: Final = ".gguf"

Fetch = Callable[[HubName], Path]
"""Returns the folder of a model on a hub, after downloading it."""
Convert = Callable[[Path], Path]
"""Returns the checkpoint folder that is made of a GGUF file."""


def configs_folder() -> Path:
    """The folder of the named configurations, also in an installed wheel."""
    return Path(str(files("configs")))


def named() -> list[str]:
    """The names of the configurations in `configs/`."""
    return sorted(path.stem for path in configs_folder().glob("*.yaml"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The keys and values of one source, not checked yet.

    Attributes:
        source: the file's path, for messages.
        folder: what relative paths in `values` are relative to.
        name: the model's, unless `values` has one.
    """

    values: dict[str, Any]
    source: str
    folder: Path
    name: str


def read(model: str, fetch: Fetch | None = None, convert: Convert | None = None) -> Base:
    """Read a name in `configs/`, a YAML or GGUF file, a checkpoint folder, or the name of a model on a hub.

    Without `fetch`, names on hubs are refused, and without `convert`, GGUF files.

    Raises:
        ConfigError: `model` is none of these, or cannot be read.
    """
    if model in named():  # takes precedence over a folder of that name, which is `./name`
        return _of_file(configs_folder() / f"{model}.yaml")
    path = Path(model)
    on_hub = HubName.parse(model)
    if path.is_dir():
        if on_hub is not None:
            _LOGGER.warning("%s is the folder %s here, not a model on a hub", model, path.resolve())
        return of_folder(path)
    if path.suffix in {".yaml", ".yml"}:
        return _of_file(path)
    if path.suffix == _GGUF and path.is_file() and convert is not None:
        return of_folder(convert(path))
    if on_hub is not None and fetch is not None:
        return of_folder(fetch(on_hub))
    near = closest_match(model, named())
    hint = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"{model!r} is no model to serve: expected one of {named()}, a YAML file, a GGUF file, "
        f"a folder with a Hugging Face checkpoint, or a model on a hub (org/name){hint}"
    )


def is_text(text: str) -> bool:
    """True if `text` can be encoded: YAML can escape a lone surrogate, UTF-8 cannot encode it."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_integer_of_64_bits(value: int) -> bool:
    """True if `value` fits 64 bits: events cannot contain larger integers."""
    return -(2**63) <= value < 2**63


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys and values that an event cannot contain."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem="a key is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if not is_text(str(value)):
            raise yaml.MarkedYAMLError(problem="half a character", problem_mark=node.start_mark)
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if not is_integer_of_64_bits(value):
            raise yaml.MarkedYAMLError(problem="an integer beyond 64 bits", problem_mark=node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        ConfigError: `text` is not YAML. The message names the place and quotes nothing: it may be a secret.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is the safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source} is no YAML: {error.problem or 'malformed'}{where}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a year 0 in a date, a thousand brackets
        raise ConfigError(f"{source} is no YAML: {type(error).__name__}") from error


def _of_file(path: Path) -> Base:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {why}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {described(values)}")
    return Base(values=values, source=str(path), folder=path.parent, name=path.stem)


def with_hub_model(base: Base, fetch: Fetch) -> Base:
    """Replace the name of a model on a hub in a file's key `model` by its family and its checkpoint.

    What the file leaves out is as for a checkpoint folder. A folder of that name beside the file wins.

    Raises:
        ConfigError: the file also names a checkpoint, or the checkpoint cannot be served.
    """
    model = base.values.get("model")
    name = HubName.parse(model) if isinstance(model, str) else None
    if name is None:
        return base
    if base.values.get("checkpoint"):
        raise ConfigError(
            f"{base.source}: expected one of model: {name} and checkpoint, found both; leave checkpoint out, "
            "or name the family in model"
        )
    local = base.folder / str(model)
    if local.is_dir():
        _LOGGER.warning("%s: model %s is the folder %s, not a model on a hub", base.source, name, local)
    found = of_folder(local if local.is_dir() else fetch(name)).values
    chosen = {key: found[key] for key in ("model", "checkpoint")}
    return replace(base, values={**found, **base.values, **chosen})


def of_folder(folder: Path) -> Base:
    """The configuration of a checkpoint folder: all nodes on rank 0.

    Raises:
        ConfigError, UnknownFamilyError: it cannot be served.
    """
    folder = folder.resolve()
    family = registry.family_of(folder)
    config = read_language_config(folder)
    graph = registry.graph(family)
    length = (context_length(config) if graph.states_length else None) or graph.max_positions
    if length is None:
        raise ConfigError(
            f"{folder}/config.json: expected an integer max_position_embeddings, found "
            f"{config.get('max_position_embeddings')!r}; write a YAML file with max_seq_len instead"
        )
    on_hub = hub_cache.origin(folder)
    name = on_hub.repository.rpartition("/")[2] if on_hub is not None else folder.name
    values: dict[str, Any] = {
        "model": family,
        "checkpoint": str(folder),
        "max_seq_len": length,
        "node_groups": [
            {"node_names": [node for node in graph.nodes if node not in graph.optional], "ranks": [0]}
        ],
    }
    return Base(values=values, source=str(folder), folder=folder, name=name)
