"""`dalsegno config MODEL`: the effective configuration, with the origin of each value.

    gateway:
      host: 127.0.0.1                     # from default
      port: 8001                          # from DALSEGNO_GATEWAY_PORT
      # api_keys: [web=***]               # from DALSEGNO_GATEWAY_API_KEYS; a secret is not printed

The output is YAML that can be saved and served. A secret from the environment is printed as a comment, so
that the saved file does not override it. A secret from the YAML file is printed masked, and the saved file is
refused until the secret is set again: otherwise it would accept clients that the original refuses.
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
"""The column of the comments, if the value is shorter."""


@click.command()
@click.argument("model")
@options.of_serve
@click.option("--json", "as_json", is_flag=True, help="As one JSON object: config, sources.")
def config(model: str, *, as_json: bool, **given: Any) -> None:
    """Show the effective configuration of MODEL.

    MODEL is a name in configs/, a YAML file, or a folder with a Hugging Face checkpoint. Nothing is started;
    a configuration that serve would refuse is refused with the same message.
    """
    found = resolve.effective(model, options.settings_in(given), with_weights=False)
    resolve.check(found)
    if as_json:
        click.echo(json.dumps({"config": values(found), "sources": dict(found.sources)}, ensure_ascii=False))
    else:
        click.echo("\n".join(lines(found)))


def values(found: Effective) -> dict[str, Any]:
    """The configuration as nested keys and values, secrets masked."""
    shown: dict[str, Any] = {}
    for key in KEYS.values():
        section, _, name = key.name.rpartition(".")
        within = shown.setdefault(section, {}) if section else shown
        within[name] = _shown(found, key.name)
    return shown


def lines(found: Effective) -> Iterator[str]:
    """The configuration in YAML, one line per value."""
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
    """Mask a secret, keeping its name if it has one."""
    name, _ = split_key(secret)
    return f"{name}={MASK}" if name else MASK


def _shown(found: Effective, name: str) -> Any:
    section, _, key = name.rpartition(".")
    value = getattr(getattr(found.config, section) if section in SECTIONS else found.config, key)
    if name in SECRETS and isinstance(value, list):
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
