"""Command-line options that several commands share. Imports nothing slow.

Options of configuration keys have no default: without the option, environment and file apply
(`dalsegno.config.resolve`). The help shows the configuration's defaults; a test compares them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from dalsegno.config.layers import Setting

_F = TypeVar("_F", bound=Callable[..., Any])


def _prefix(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from shared.ids import is_prefix

    if value is not None and not is_prefix(value):
        raise click.BadParameter(f"{value!r}: expected 1 to 64 lower-case letters, digits, '_' or '-'")
    return value


def _set(ctx: click.Context, parameter: click.Parameter, value: Sequence[str]) -> Sequence[str]:
    """Report an invalid --set as a usage error."""
    from configs.deployment import ConfigError
    from dalsegno.config.layers import of_flag

    for text in value:
        try:
            of_flag(text)
        except ConfigError as error:
            raise click.BadParameter(error.message.removeprefix("--set: ")) from error
    return value


PREFIX: Final = click.option(
    "--prefix",
    show_default="ds",
    callback=_prefix,
    help="First token of all subjects, different for deployments that share a NATS server.",
)
SET: Final = click.option(
    "--set",
    "set_",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_set,
    help="Any key of the configuration, e.g. gateway.max_tokens=512; can be repeated.",
)
_HOST: Final = click.option("--host", show_default="127.0.0.1", help="Address to listen on.")
_PORT: Final = click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="8000",
    help="Port to listen on; 0 chooses a free one.",
)
_NATS: Final = click.option(
    "--nats",
    metavar="URL",
    help="The NATS server, nats://host:port, or several separated by commas; token in DALSEGNO_NATS_TOKEN.",
)
_NATS_OF_SERVE: Final = click.option(
    "--nats", metavar="URL", help="Join this NATS server instead of starting a private one."
)
_DURABILITY: Final = click.option(
    "--durability",
    type=click.Choice(("process", "host", "cluster")),
    show_default="process",
    help="The failure that acknowledged events must survive; a server that does not provide it is refused.",
)
_LOG_LEVEL: Final = click.option(
    "--log-level",
    type=click.Choice(("debug", "info", "warning", "error")),
    show_default="info",
    help="Least severe level to log.",
)
_LOG_FORMAT: Final = click.option(
    "--log-format", type=click.Choice(("human", "json")), show_default="human", help="Format of log lines."
)
_CONFIG: Final = click.option(
    "--config",
    "model",
    required=True,
    metavar="MODEL",
    help="The model: a name in configs/, a YAML file, or a checkpoint folder.",
)
_CHECKPOINT: Final = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder with the model's weights. [default: from the file, else the hub cache]",
)
_PARENT: Final = click.option(
    "--parent", type=int, hidden=True, help="PID of the launcher; the role ends with it."
)
_PROFILE_PARTS: Final = click.option(
    "--profile-parts",
    type=click.Path(path_type=Path, file_okay=False),
    hidden=True,
    help="Folder for this role's part of the profile.",
)
_DATA_DIR: Final = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The deployment's data dir, running or stopped. [default: $DALSEGNO_DATA_DIR, else the one in "
    "./.dalsegno, of several the running one]",
)
_DATA_DIR_OF_SERVE: Final = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the log. [default: $DALSEGNO_DATA_DIR, else ./.dalsegno/MODEL]",
)
_DATA_DIR_OF_CONDUCTOR: Final = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of its snapshots. [default: $DALSEGNO_DATA_DIR, else none]",
)
_ALONE: Final = click.option(
    "--alone", is_flag=True, hidden=True, help="There is no other conductor: do not wait for one."
)
_READ_NATS: Final = click.option(
    "--nats", metavar="URL", help="Read from this NATS server; token in DALSEGNO_NATS_TOKEN."
)


def of_serve(command: _F) -> _F:
    """Options of a whole deployment."""
    logs = _CHECKPOINT(_LOG_LEVEL(_LOG_FORMAT(SET(command))))
    return _HOST(_PORT(_DATA_DIR_OF_SERVE(_NATS_OF_SERVE(PREFIX(_DURABILITY(logs))))))


def of_role(command: _F) -> _F:
    """Options of every role."""
    launched = _PARENT(_PROFILE_PARTS(command))
    return _NATS(PREFIX(_DURABILITY(_CONFIG(_CHECKPOINT(_LOG_LEVEL(_LOG_FORMAT(SET(launched))))))))


def of_gateway(command: _F) -> _F:
    """Options of the gateway."""
    return _HOST(_PORT(of_role(command)))


def of_conductor(command: _F) -> _F:
    """Options of the conductor."""
    return _DATA_DIR_OF_CONDUCTOR(_ALONE(of_role(command)))


def of_log(command: _F) -> _F:
    """Options of the NATS server and the log's retention."""
    return _NATS(PREFIX(_DURABILITY(SET(command))))


def of_reader(command: _F) -> _F:
    """Options of every command that reads a log (`dalsegno.history.log_source`)."""
    return _DATA_DIR(_READ_NATS(PREFIX(command)))


def settings_in(options: dict[str, Any]) -> "tuple[Setting, ...]":
    """Remove the configuration from a command's options and return it as settings."""
    from dalsegno.config.resolve import FLAGS, settings_of

    return settings_of(**{name: options.pop(name) for name in ("set_", *FLAGS) if name in options})
