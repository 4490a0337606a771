"""The command line.

Each command imports what it needs when it runs: `serve` starts its processes within a tenth of a second,
and a conductor sees no HTTP library.

A mistake of the person is one line on stderr and status 1, or 2 when it is in the arguments; never a
traceback. What a role refuses for good is 78, from the role and from `serve`.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from dalsegno.config import options
from shared.errors import DalSegnoError

if TYPE_CHECKING:
    from dalsegno.serve.role_process import RoleOptions

DEFAULT_URL: Final = "http://127.0.0.1:8000"
EX_INTERRUPTED: Final = 130

_ELSEWHERE: Final = {
    "check": ("dalsegno.check.command", "check"),
    "config": ("dalsegno.config.command", "config"),
    "export": ("dalsegno.bundle.export", "export"),
    "init-security": ("dalsegno.security.command", "init_security"),
    "log": ("dalsegno.history.command", "log"),
    "replay": ("dalsegno.replay.command", "replay"),
}
"""Commands in modules of their own, imported when they are called or listed."""

_SECTIONS: Final = {
    "Commands": ("serve", "ask", "log", "replay", "export", "check", "config"),
    "The roles one by one, on a NATS server of your own": (
        "init-security",
        "provision",
        "gateway",
        "conductor",
        "worker",
    ),
    "Besides": ("version",),
}


class Commands(click.Group):
    """The commands, in the order of a first acquaintance; errors of ours are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _SECTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, names in _SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(section):
                formatter.write_dl(
                    [(f"{name:<9}", one.get_short_help_str(limit=100)) for name, one in commands if one]
                )

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
        except KeyboardInterrupt:  # how following ends; for click it is worth an "Aborted!"
            ctx.exit(EX_INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dalsegno", message="%(version)s")
def main() -> None:
    """Dal Segno: an event-sourced, replayable server for composite models."""


@main.command()
@click.argument("model")
@options.of_serve
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Receives addresses, what NATS asks for, and process ids as JSON once all is ready.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Receives what all processes did and when, for ui.perfetto.dev, when they have ended.",
)
def serve(model: str, ready_file: Path | None, profile: Path | None, **told: Any) -> None:
    """Serve MODEL on this machine: all it needs, supervised.

    MODEL is a name in configs/ (try `demo`), a YAML file, or a folder with a Hugging Face checkpoint.
    """
    from dalsegno.serve.launcher import ServeOptions, serve
    from dalsegno.serve.supervisor import EX_CONFIG, RefusedError

    try:
        serve(
            ServeOptions(model=model, told=options.settings_in(told), ready_file=ready_file, profile=profile)
        )
    except RefusedError as error:
        click.echo(f"Error: {error.message}", err=True)
        sys.exit(EX_CONFIG)


@main.command()
@click.argument("text")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server.")
@click.option("--model", help="One of the server's models. [default: its first]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="At most so many.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
def ask(**told: Any) -> None:
    """Ask a running server, and print the answer as it comes.

    TEXT is the question; `-` is what stdin says. A server that asks for a key gets $DALSEGNO_API_KEY.
    """
    from dalsegno.ask import Question, ask
    from dalsegno.config import environment

    if told["text"] == "-":
        told["text"] = sys.stdin.read()
    began = False
    try:
        for piece in ask(
            Question(**told, api_key=environment.read().api_key), lambda text: click.echo(text, err=True)
        ):
            click.echo(piece, nl=False)
            began = True
    finally:
        if began:
            click.echo()


@main.command()
@options.of_log
def provision(**told: Any) -> None:
    """Make a deployment's stream in a NATS server.

    One that is there already stays, with all it holds.
    """
    import asyncio

    from configs.deployment import log_keeping, nats_credentials
    from dalsegno.config import address, resolve
    from dalsegno.serve.launcher import provision
    from shared.log.nats.durability import PROMISES
    from shared.log.nats.permissions import PROVISIONER

    nats = resolve.reach(options.settings_in(told)).nats
    if nats.url is None:
        raise click.UsageError("which NATS server? Name it with --nats, or in DALSEGNO_NATS_URL")
    url = address.nats_url(nats.url)
    asyncio.run(provision(url, nats_credentials(nats, PROVISIONER), nats.prefix, log_keeping(nats)))
    click.echo(f"The stream of prefix {nats.prefix!r} is in {url}: {PROMISES[nats.durability]}.")


@main.command()
@options.of_gateway
def gateway(**told: Any) -> None:
    """Run one gateway: HTTP in, events out."""
    from dalsegno.serve import role_process

    _leave(role_process.gateway(_options(told)))


@main.command()
@options.of_conductor
def conductor(alone: bool, **told: Any) -> None:
    """Run one conductor; of several, one leads and the others stand by."""
    from dalsegno.serve import role_process

    _leave(role_process.conductor(_options(told), alone=alone))


@main.command()
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which position.")
@options.of_role
def worker(rank: int, **told: Any) -> None:
    """Run the worker of one rank."""
    from dalsegno.serve import role_process

    _leave(role_process.worker(_options(told), rank))


@main.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    click.echo(version("dalsegno"))


def _leave(status: int) -> NoReturn:
    from dalsegno.serve import gc_tuning

    gc_tuning.leave_all()
    sys.exit(status)


def _options(told: dict[str, Any]) -> "RoleOptions":
    from dalsegno.serve.role_process import RoleOptions

    return RoleOptions(told=options.settings_in(told), **told)
