"""`dalsegno config MODEL`: the configuration that would be served, and where each value is from.

    gateway:
      host: 127.0.0.1                     # from default
      port: 8001                          # from DALSEGNO_GATEWAY_PORT
      # api_keys: [web=***]               # from DALSEGNO_GATEWAY_API_KEYS; a secret is not printed

It is YAML that can be saved and served as it is. A secret of the environment stands there as a comment, so
that what is saved says nothing in its place: where it is from, it still is. One that is in the YAML file
stands there masked, and is refused until it is said again: what is saved must not let in who was kept out.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec
import yaml

from configs.deployment import MASK, SECRETS, SECTIONS
from configs.secrets import split_key
from dalsegno.config import options, resolve
from dalsegno.config.layers import KEYS, Effective

_COMMENT_AT: Final = 40
"""The column of the comments, where the values leave room."""


@click.command()
@click.argument("model")
@options.of_serve
@click.option("--json", "as_json", is_flag=True, help="As one JSON object: config, sources.")
def config(model: str, *, as_json: bool, **told: Any) -> None:
    """Show the configuration that serve would run MODEL with.

    MODEL is a name in configs/, a YAML file, or a folder with a Hugging Face checkpoint. Nothing is started;
    what could not be served is refused as serve refuses it.
    """
    found = resolve.effective(model, options.settings_in(told))
    resolve.check(found)
    if as_json:
        click.echo(json.dumps({"config": values(found), "sources": dict(found.sources)}, ensure_ascii=False))
    else:
        click.echo("\n".join(lines(found)))


def values(found: Effective) -> dict[str, Any]:
    """The configuration as keys and values, secrets masked."""
    shown: dict[str, Any] = {}
    for key in KEYS.values():
        section, _, name = key.name.rpartition(".")
        within = shown.setdefault(section, {}) if section else shown
        within[name] = _shown(found, key.name)
    return shown


def lines(found: Effective) -> Iterator[str]:
    """The configuration in YAML, a line per value."""
    section = ""
    for key in KEYS.values():
        if key.section != section:
            section = key.section
            yield f"{section}:"
        indent = "  " if section else ""
        name, value, source = key.name.rpartition(".")[2], _shown(found, key.name), found.sources[key.name]
        if key.name in SECRETS and value:
            is_said_again = source == key.variable
            source += "; a secret is not printed"
            yield _line(f"{indent}{'# ' if is_said_again else ''}{name}: {_flow(value)}", source)
        elif isinstance(value, dict) and value:
            yield f"{name}:"
            for inner, one in value.items():
                yield _line(f"  {_flow(inner)}: {_flow(one)}", found.sources[f"{key.name}.{inner}"])
        elif key.name == "node_groups":
            yield _line(f"{name}:", source)
            yield from (f"  - {_flow(group)}" for group in value)
        else:
            yield _line(f"{indent}{name}: {_flow(value)}", source)


def masked(secret: str) -> str:
    """A secret's name, where it has one, and no more of it."""
    name, _ = split_key(secret)
    return f"{name}={MASK}" if name else MASK


def _shown(found: Effective, name: str) -> Any:
    section, _, key = name.rpartition(".")
    value = getattr(getattr(found.config, section) if section in SECTIONS else found.config, key)
    if name == "gateway.api_keys":
        return [masked(one) for one in value]
    if name in SECRETS:
        return MASK if value else None
    return msgspec.to_builtins(value)


def _line(text: str, source: str) -> str:
    return f"{text:<{_COMMENT_AT - 2}}  # from {source}"


def _flow(value: Any) -> str:
    """A value in YAML, on one line."""
    text: str = yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.strip().removeprefix("[").removesuffix("]")
