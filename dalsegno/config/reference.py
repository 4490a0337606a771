"""Generator of the tables in docs/configuration.md, from the configuration structs.

    $ python -m dalsegno.config.reference docs/configuration.md

replaces the tables between their markers; the text around them is written by hand. Type and default of a key
come from its annotation, its meaning from the section `Attributes` of the struct's docstring. The families'
nodes come from their graphs.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from configs.deployment import (
    DataPlaneSettings,
    DeploymentConfig,
    GatewaySettings,
    LogSettings,
    MediaSettings,
    NatsSettings,
    NodeGroup,
    RecoverySettings,
    SchedulingSettings,
    SealingSettings,
)
from models import registry
from models.base import ModelGraph
from shared.docstrings import meanings_of
from shared.telemetry.settings import TraceSettings

_STRUCTS: Final = {
    kind.__name__: kind
    for kind in (
        DeploymentConfig,
        NodeGroup,
        SchedulingSettings,
        DataPlaneSettings,
        GatewaySettings,
        MediaSettings,
        LogSettings,
        TraceSettings,
        NatsSettings,
        RecoverySettings,
        SealingSettings,
    )
}
_TABLE: Final = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NODES: Final = re.compile(r"(<!-- nodes of the families -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD: Final = "| key | type | default | meaning |\n|---|---|---|---|\n"


def page(text: str) -> str:
    """Return the page with regenerated tables."""
    text = _TABLE.sub(lambda found: f"{found[1]}{table(_STRUCTS[found[2]])}{found[3]}", text)
    return _NODES.sub(lambda found: f"{found[1]}{nodes_table()}{found[2]}", text)


def table(kind: type[msgspec.Struct]) -> str:
    """Return a Markdown table with a row per key of a struct."""
    meanings = meanings_of(kind)
    return _HEAD + "".join(
        f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} | {meanings[field.name]} |\n"
        for field in _fields(kind)
    )


def nodes_table() -> str:
    """Return a Markdown table of the families' nodes; families with equal nodes share a row."""
    families: dict[str, list[str]] = {}
    for family in filter(registry.is_built_in, registry.families()):
        families.setdefault(_nodes(registry.graph(family)), []).append(f"`{family}`")
    return "| family | nodes |\n|---|---|\n" + "".join(
        f"| {', '.join(names)} | {nodes} |\n" for nodes, names in families.items()
    )


def _nodes(graph: ModelGraph) -> str:
    return ", ".join(f"`{node}`" + " (optional)" * (node in graph.optional) for node in graph.nodes)


def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found.fields


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value: Any = field.default_factory() if callable(field.default_factory) else field.default
    match value:
        case None | "":
            return "none"
        case msgspec.Struct():
            return "its keys' own"
        case str():
            return f"`{value}`"
        case float() if value.is_integer():
            return f"`{int(value)}`"
        case _:
            return f"`{json.dumps(value)}`"


def _type(kind: inspect.Type) -> str:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return " or ".join(_noun(one) for one in members if not isinstance(one, inspect.NoneType))


def _noun(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "string"
        case inspect.IntType():
            return f"integer{''.join(_bounds(kind))}"
        case inspect.FloatType():
            return f"number{''.join(_bounds(kind))}"
        case inspect.ListType(item_type=inspect.StructType()):
            return "list of maps"
        case inspect.ListType(item_type=inspect.LiteralType()):
            return f"list of {_noun(kind.item_type)}"
        case inspect.ListType():
            empty = ", not empty" if kind.min_length else ""
            return f"list of {_noun(kind.item_type).partition(',')[0]}s{empty}"
        case _:
            return "map"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> Iterator[str]:
    if kind.gt is not None:
        yield f", above {kind.gt:g}"
    if kind.ge is not None:
        yield f", {kind.ge} to {kind.le}" if kind.le is not None else f", {kind.ge} or more"
    elif kind.le is not None:
        yield f" up to {kind.le}"


def main(path: Path) -> None:
    """Rewrite the tables of one page."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
