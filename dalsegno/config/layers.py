"""Layers of a configuration: flags override environment variables, which override the file.

    file          gateway: {port: 9000}
    environment   DALSEGNO_GATEWAY_PORT=9001
    flag          --set gateway.port=9002            result: 9002, from --set

Every key of `DeploymentConfig` has an environment variable and can be set by flag. The keys of a map
(`model_kwargs`) are set one by one; a list is replaced as a whole. Pure: callers read files and environment.

Not pydantic-settings, for the reasons in ADR 24.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final

import msgspec
from msgspec import inspect

from configs.checks import check, discreet, hint_for
from configs.deployment import PATH_MAPS, SECRETS, SECTIONS, ConfigError, DeploymentConfig, paths
from configs.files import Base, is_integer_of_64_bits, is_text, parse_yaml
from configs.renamed_keys import RENAMED
from models import registry
from shared.validation_errors import ValidationProblem, validation_problem

VARIABLE_PREFIX: Final = "DALSEGNO_"
DEFAULT: Final = "default"
"""The origin of values that are not set."""

_INTEGER: Final = re.compile(r"[+-]?\d{1,30}")
_TRUTH: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT(_.+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
"""Variables by which Kubernetes describes a service called `dalsegno` or `dalsegno-...` to every pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: as used by `--set`, e.g. `gateway.port`.
        type: its annotation.
        default: as in a YAML file; `msgspec.NODEFAULT` for required keys.
    """

    name: str
    type: Any
    default: Any

    @property
    def variable(self) -> str:
        """The environment variable that sets the key."""
        return VARIABLE_PREFIX + self.name.replace(".", "_").upper()

    @property
    def section(self) -> str:
        """The section of the key; empty at the top level."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value from a variable or a flag.

    Attributes:
        key: e.g. `gateway.port`, or a key in a map such as `model_kwargs.max_sequences`.
        text: as given.
        value: the parsed value, as in a YAML file.
        source: the variable or the flag.
    """

    key: str
    text: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """A configuration and the origin of each value.

    Attributes:
        sources: by key, also by key in a map: a file, a variable, a flag, or `DEFAULT`.
    """

    config: DeploymentConfig
    sources: Mapping[str, str]


def _keys() -> Iterator[Key]:
    for field in msgspec.structs.fields(DeploymentConfig):
        if field.name not in SECTIONS:
            yield _key(field.name, field)
    for section, kind in SECTIONS.items():
        for field in msgspec.structs.fields(kind):
            yield _key(f"{section}.{field.name}", field)


def _key(name: str, field: msgspec.structs.FieldInfo) -> Key:
    made = field.default_factory
    default = made() if callable(made) else field.default
    return Key(name=name, type=field.type, default=default)


KEYS: Final[Mapping[str, Key]] = {key.name: key for key in _keys()}
"""All keys in the order of a file: top level first, then section by section."""

_MAPS: Final = frozenset(
    key.name for key in KEYS.values() if isinstance(inspect.type_info(key.type), inspect.DictType)
)
_VARIABLES: Final[Mapping[str, Key]] = {key.variable: key for key in KEYS.values()}


def of_environment(environ: Mapping[str, str]) -> list[Setting]:
    """Read the settings from environment variables; empty variables are ignored.

    Raises:
        ConfigError: a variable has our prefix and names no key, or its value does not fit the key.
    """
    found: list[Setting] = []
    for name, text in sorted(environ.items()):
        if not name.startswith(VARIABLE_PREFIX) or not text or _is_of_kubernetes(name, text):
            continue
        if name not in _VARIABLES:
            known = {variable.removeprefix(VARIABLE_PREFIX): variable for variable in _VARIABLES}
            leaves = {key.name.rpartition(".")[2].upper(): key.variable for key in KEYS.values()}
            near = hint_for(name.removeprefix(VARIABLE_PREFIX), leaves | known, listed=_VARIABLES)
            raise ConfigError(f"unknown environment variable {name}; {near}")
        found.append(setting(_VARIABLES[name].name, text, name))
    return found


def of_flag(text: str) -> Setting:
    """Parse the text of `--set key=value`.

    Raises:
        ConfigError: the text has another form, the key is unknown or a secret, or the value does not fit.
    """
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--set {key}: expected key=value, e.g. gateway.port=8001")
    return setting(key.strip(), value, "--set")


def setting(name: str, text: str, source: str) -> Setting:
    """Parse the text of one value for the key `name`.

    Raises:
        ConfigError: see `of_environment` and `of_flag`; the message names `source`.
    """
    if not is_text(text):
        raise ConfigError(f"{source}: {name}: expected text in UTF-8, found other bytes")
    map_, _, inner = name.partition(".")
    if map_ in _MAPS and inner:
        value = parse_yaml(text, f"{source}: {name}")
        return Setting(key=name, text=text, value=value, source=source)
    key = KEYS.get(name)
    if key is None:
        raise ConfigError(f"{source}: unknown key {name}; {_meant(name)}")
    if name in SECRETS and source.startswith("--"):
        elsewhere = " or into the file of gateway.api_keys_file" if name == "gateway.api_keys" else ""
        raise ConfigError(
            f"{source}: {name} is a secret, and other users can see arguments: "
            f"put it into {key.variable}{elsewhere}"
        )
    value = _value(key, text, source)
    if name in _MAPS and isinstance(value, dict):  # `check` reports errors in its keys
        return Setting(key=name, text=text, value=value, source=source)
    try:
        msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        found = validation_problem(error, value, key.type)
        place = name + (f".{found.place}" if found.place and not found.place.startswith("[") else found.place)
        raise ConfigError(f"{source}: {discreet(ValidationProblem(place, found.problem))}") from error
    return Setting(key=name, text=text, value=value, source=source)


def overlay(base: Base, settings: Iterable[Setting], here: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Put `settings` on top of the file's values, later ones over earlier ones; return values and origins.

    Args:
        base: the file's values.
        settings: the values from environment and flags.
        here: the folder that relative paths in `settings` start from.
    """
    values = dict(base.values)
    sources = {name: base.source if _has(base.values, name) else DEFAULT for name in KEYS}
    if not base.values.get("name"):
        sources["name"] = base.source
    for map_ in _MAPS:
        if isinstance(inner := base.values.get(map_), dict):
            sources |= {f"{map_}.{key}": base.source for key in inner}
    said = list(settings)
    family = next((one.value for one in reversed(said) if one.key == "model"), values.get("model"))
    are_paths = paths(family)
    renamed = _renamed(family)

    def as_said_here(key: str, value: Any) -> Any:
        is_path = key in are_paths or key.partition(".")[0] in PATH_MAPS
        is_relative = is_path and isinstance(value, str) and not value.startswith("~")
        return str(here / value) if is_relative else value

    def replace_other(key: str) -> None:
        """Remove the value that a lower layer has under the key's other name, old or current."""
        map_, _, name = renamed.get(key, "").partition(".")
        if isinstance(inside := values.get(map_), dict) and name in inside:
            values[map_] = {inner: value for inner, value in inside.items() if inner != name}
            del sources[f"{map_}.{name}"]

    for one in said:
        if one.key in _MAPS:
            for key, item in one.value.items():
                name = f"{one.key}.{key}"
                replace_other(name)
                _put(values, name, as_said_here(name, item), base.source)
                sources[name] = one.source
        else:
            replace_other(one.key)
            _put(values, one.key, as_said_here(one.key, one.value), base.source)
        sources[one.key] = one.source
    return values, sources


def effective(
    base: Base, settings: Sequence[Setting], here: Path, hub_cache: Path | None = None
) -> Effective:
    """Put `settings` on top of `base` and check the result.

    `hub_cache` is the local cache of the Hugging Face hub, for a base that names no checkpoint.

    Raises:
        ConfigError: the configuration cannot be served; names origin, key, value and what was expected.
    """
    values, sources = overlay(base, settings, here)
    said = {key: source for key, source in sources.items() if source not in {DEFAULT, base.source}}
    config = check(
        values, source=base.source, folder=base.folder, name=base.name, sources=said, hub_cache=hub_cache
    )
    for old, new in RENAMED.items():
        if new in config.model_kwargs and old not in config.model_kwargs and f"model_kwargs.{old}" in sources:
            sources[f"model_kwargs.{new}"] = sources.pop(f"model_kwargs.{old}")
    if sources["checkpoint"] == DEFAULT:
        sources["checkpoint"] = "the hub cache"
    return Effective(config=config, sources=sources)


def _renamed(family: object) -> dict[str, str]:
    """The other name of each renamed key: the current one by the old, and the old one by the current."""
    own = registry.graph(family).kwargs if isinstance(family, str) and family in registry.families() else ()
    pairs = [(f"model_kwargs.{old}", f"model_kwargs.{new}") for old, new in RENAMED.items() if old not in own]
    return dict(pairs) | {new: old for old, new in pairs}


def _is_of_kubernetes(name: str, text: str) -> bool:
    return bool(_OF_KUBERNETES.search(name)) or (name.endswith("_PORT") and "://" in text)


def _meant(name: str) -> str:
    if name in SECTIONS:
        inside = [key.name for key in KEYS.values() if key.section == name]
        return f"it is a section: expected one of {inside}"
    leaves = {key.rpartition(".")[2]: key for key in KEYS}
    return hint_for(name, leaves | {key: key for key in KEYS}, listed=KEYS)


def _value(key: Key, text: str, source: str) -> Any:
    """Convert `text` to the value that a YAML file would have; leave it unchanged if it does not parse."""
    kinds = _members(inspect.type_info(key.type))
    if inspect.NoneType in map(type, kinds) and text in {"", "null"}:
        return None
    kind = next(one for one in kinds if not isinstance(one, inspect.NoneType))
    match kind:
        case inspect.StrType() | inspect.LiteralType():
            return text
        case inspect.BoolType():
            return _TRUTH.get(text.lower(), text)
        case inspect.IntType():
            return _integer(key, text, source) if _INTEGER.fullmatch(text) else text
        case inspect.FloatType():
            return _number(text)
        case inspect.ListType(item_type=inspect.StrType()) if text == "null":
            return []  # the origin of sandboxed pages is called null too: write it as [null]
        case inspect.ListType(item_type=inspect.StrType() | inspect.LiteralType()) if text[:1] != "[":
            return [item for part in text.split(",") if (item := part.strip())]
        case _:
            return parse_yaml(text, f"{source}: {key.name}")


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _integer(key: Key, text: str, source: str) -> int:
    value = int(text)
    if not is_integer_of_64_bits(value):
        raise ConfigError(f"{source}: {key.name}: expected an integer of 64 bits, found {text}")
    return value


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _has(values: Mapping[str, Any], name: str) -> bool:
    """Tell whether the file sets a key."""
    section, _, key = name.rpartition(".")
    inside = values.get(section) if section else values
    return isinstance(inside, Mapping) and key in inside


def _put(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set a value in a copy of its section or map; the file's values stay unchanged."""
    section, _, key = name.partition(".")
    if not key:
        values[name] = value
        return
    inside = values.get(section)
    if not isinstance(inside, dict | NoneType):
        problem = f"expected an object, found a {type(inside).__name__}"
        raise ConfigError(f"{source}: {section}: {problem}")
    name_of = {str(one): one for one in inside or ()}  # in a file, ranks are numbers
    values[section] = {**(inside or {}), name_of.get(key, key): value}
