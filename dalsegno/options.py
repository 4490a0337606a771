"""Options that several commands share. Nothing is imported here that would hold a command up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def _prefix(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    from shared.ids import is_prefix

    if not is_prefix(value):
        raise click.BadParameter(f"{value!r}: expected 1 to 64 small letters, digits, '_' or '-'")
    return value


PREFIX: Final = click.option(
    "--prefix",
    default="ds",
    show_default=True,
    callback=_prefix,
    help="First token of all subjects; deployments that share a NATS differ in it.",
)
NATS: Final = click.option(
    "--nats",
    required=True,
    metavar="URL",
    help="The NATS server, nats://host:port; its token in DALSEGNO_NATS_TOKEN.",
)
LOG_LEVEL: Final = click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    show_default=True,
    help="What is logged.",
)
HOST: Final = click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
PORT: Final = click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
_CONFIG: Final = click.option(
    "--config",
    required=True,
    metavar="MODEL",
    help="The model: a name in configs/, a YAML file, or a checkpoint folder.",
)
_PARENT: Final = click.option("--parent", type=int, hidden=True, help="The launcher this role dies with.")
_DATA_DIR: Final = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The deployment's, running or at rest. [default: $DALSEGNO_DATA_DIR, else the one in ./.dalsegno]",
)
_READ_NATS: Final = click.option(
    "--nats", metavar="URL", help="Read from this NATS server; token in DALSEGNO_NATS_TOKEN."
)


def of_role(command: _F) -> _F:
    """The options of every role."""
    return NATS(PREFIX(_CONFIG(LOG_LEVEL(_PARENT(command)))))


def of_reader(command: _F) -> _F:
    """The options of every command that reads a log (`dalsegno.source`)."""
    return _DATA_DIR(_READ_NATS(PREFIX(command)))
