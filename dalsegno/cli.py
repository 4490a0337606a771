"""The command line.

Each command imports what it needs when it runs: `serve` starts its processes within a tenth of a second,
and a conductor sees no HTTP library.

A mistake of the person is one line on stderr and status 1, or 2 when it is in the arguments; never a
traceback.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from shared.errors import DalSegnoError

if TYPE_CHECKING:
    from dalsegno.roles import RoleOptions

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_LEVELS: Final = ("debug", "info", "warning", "error")

_ELSEWHERE: Final = {
    "log": ("dalsegno.history", "log"),
    "replay": ("dalsegno.replay", "replay"),
}
"""Commands in modules of their own, imported when they are called or listed."""


class Commands(click.Group):
    """The commands, in the order of a first acquaintance; errors of ours are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, name = _ELSEWHERE[cmd_name]
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DalSegnoError as error:
            raise click.ClickException(error.message) from error


def _prefix(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    from shared.ids import is_token

    if not is_token(value):
        raise click.BadParameter(f"{value!r}: expected 1 to 64 letters, digits, '_' or '-'")
    return value


_PREFIX: Final = click.option(
    "--prefix",
    default="ds",
    show_default=True,
    callback=_prefix,
    help="First token of all subjects; deployments that share a NATS differ in it.",
)
_NATS: Final = click.option(
    "--nats",
    required=True,
    metavar="URL",
    help="The NATS server, nats://host:port; its token in DALSEGNO_NATS_TOKEN.",
)
_LOG_LEVEL: Final = click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="What is logged."
)
_HOST: Final = click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
_PORT: Final = click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."
)
_CONFIG: Final = click.option(
    "--config",
    required=True,
    metavar="MODEL",
    help="The model: a name in configs/, a YAML file, or a checkpoint folder.",
)


def _role(command: _F) -> _F:
    """The options of every role."""
    parent = click.option("--parent", type=int, hidden=True, help="The launcher this role dies with.")
    for option in (parent, _LOG_LEVEL, _CONFIG, _PREFIX, _NATS):
        command = option(command)
    return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dalsegno", message="%(version)s")
def main() -> None:
    """Dal Segno: an event-sourced, replayable server for composite models."""


@main.command()
@click.argument("model")
@_HOST
@_PORT
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the log is kept. [default: $DALSEGNO_DATA_DIR, else ./.dalsegno/MODEL]",
)
@click.option("--nats", metavar="URL", help="Join this NATS server instead of starting a private one.")
@_PREFIX
@_LOG_LEVEL
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Receives addresses, token and process ids as JSON once all is ready.",
)
def serve(**told: Any) -> None:
    """Serve MODEL on this machine: everything it needs, supervised.

    MODEL is a name in configs/ (try `demo`), a YAML file, or a folder with a Hugging Face checkpoint.
    """
    from dalsegno.launcher import ServeOptions, serve

    serve(ServeOptions(**told))


@main.command()
@click.argument("text")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server.")
@click.option("--model", help="One of the server's models. [default: its first]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="At most so many.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
def ask(**told: Any) -> None:
    """Ask a running server TEXT (`-`: what stdin says) and print the answer as it comes."""
    from dalsegno.ask import Question, ask

    if told["text"] == "-":
        told["text"] = sys.stdin.read()
    began = False
    try:
        for piece in ask(Question(**told)):
            click.echo(piece, nl=False)
            began = True
    finally:
        if began:
            click.echo()


@main.command()
@_NATS
@_PREFIX
def provision(nats: str, prefix: str) -> None:
    """Make the streams in a NATS server; those that are there stay as they are."""
    import asyncio

    from dalsegno import address, environment
    from dalsegno.launcher import provision

    url = address.nats_url(nats)
    asyncio.run(provision(url, environment.read().nats_token, prefix))
    click.echo(f"The streams of prefix {prefix!r} are in {url}.")


@main.command()
@_HOST
@_PORT
@_role
def gateway(host: str, port: int, **told: Any) -> None:
    """Run one gateway: HTTP in, events out."""
    from dalsegno import roles

    sys.exit(roles.gateway(_options(told), told["config"], host, port))


@main.command()
@_role
def conductor(**told: Any) -> None:
    """Run one conductor; of several, one leads and the others stand by."""
    from dalsegno import roles

    sys.exit(roles.conductor(_options(told), told["config"]))


@main.command()
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which position.")
@_role
def worker(rank: int, **told: Any) -> None:
    """Run the worker of one rank."""
    from dalsegno import roles

    sys.exit(roles.worker(_options(told), told["config"], rank))


@main.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    click.echo(version("dalsegno"))


def _options(told: dict[str, Any]) -> "RoleOptions":
    from dalsegno import address
    from dalsegno.roles import RoleOptions

    return RoleOptions(
        nats=address.nats_url(told["nats"]),
        prefix=told["prefix"],
        log_level=told["log_level"],
        parent=told["parent"],
    )
