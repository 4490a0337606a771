"""Sources of a configuration: a name in `configs/`, a YAML file, or a checkpoint folder. Not checked yet."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from configs.deployment import ConfigError
from models import registry
from models.checkpoints.files import context_length, read_language_config
from shared.closest_match import closest_match
from shared.validation_errors import described

_ON_A_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")


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


def read(model: str) -> Base:
    """Read a name in `configs/`, a YAML file, or a checkpoint folder.

    Raises:
        ConfigError: `model` is none of these, or cannot be read.
    """
    if model in named():  # takes precedence over a folder of that name, which is `./name`
        return _of_file(configs_folder() / f"{model}.yaml")
    path = Path(model)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in {".yaml", ".yml"}:
        return _of_file(path)
    near = closest_match(model, named())
    hint = f"; did you mean {near!r}?" if near else ""
    if hub := _ON_A_HUB.fullmatch(model):
        get = f"`hf download {model} --local-dir {hub[1]}`"
        hint = f"; nothing is downloaded by itself: {get}, then serve ./{hub[1]}"
    raise ConfigError(
        f"{model!r} is no model to serve: expected one of {named()}, a YAML file, "
        f"or a folder with a Hugging Face checkpoint{hint}"
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


def _of_folder(folder: Path) -> Base:
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
    values: dict[str, Any] = {
        "model": family,
        "checkpoint": str(folder),
        "max_seq_len": length,
        "node_groups": [
            {"node_names": [node for node in graph.nodes if node not in graph.optional], "ranks": [0]}
        ],
    }
    return Base(values=values, source=str(folder), folder=folder, name=folder.name)
