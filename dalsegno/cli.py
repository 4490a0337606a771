"""The command line: the table of commands, and how errors become exit statuses.

To add a command, write a click command in the `command.py` of a package and add its line to `COMMANDS`. A
command's module is imported when that command runs or the help lists it, so each command loads only what it
needs: `serve` starts its processes within a tenth of a second, and a conductor loads no HTTP library.

A user's mistake is one line on stderr and status 1, or 2 for wrong arguments; never a traceback. Status 78
is a role's permanent refusal, from the role and from `serve` (`dalsegno.exit_status`).
"""

from importlib import import_module
from typing import Any, Final

import click

from dalsegno.exit_status import EX_INTERRUPTED
from shared.errors import DalSegnoError

COMMANDS: Final = {
    "Commands": {
        "serve": "dalsegno.serve.command:serve",
        "ask": "dalsegno.ask.command:ask",
        "chat": "dalsegno.chat.command:chat",
        "transcribe": "dalsegno.transcribe.command:transcribe",
        "log": "dalsegno.history.command:log",
        "why": "dalsegno.why.command:why",
        "studio": "dalsegno.studio.command:studio",
        "replay": "dalsegno.replay.command:replay",
        "gate": "dalsegno.gate.command:gate",
        "what-if": "dalsegno.what_if.command:what_if",
        "export": "dalsegno.what_if.export_command:export",
        "verify": "dalsegno.verify.command:verify",
        "check": "dalsegno.check.command:check",
        "config": "dalsegno.config.command:config",
    },
    "Single roles, on a NATS server of your own": {
        "init-security": "dalsegno.security.command:init_security",
        "provision": "dalsegno.roles.command:provision",
        "gateway": "dalsegno.roles.command:gateway",
        "conductor": "dalsegno.roles.command:conductor",
        "worker": "dalsegno.roles.command:worker",
    },
    "Other": {"version": "dalsegno.cli:version"},
}
"""By section of the help: each command's name, and the module and name of its click command."""

_LOCATIONS: Final = {name: location for section in COMMANDS.values() for name, location in section.items()}


class Commands(click.Group):
    """The commands of `COMMANDS`, in that order. A `DalSegnoError` is printed as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_LOCATIONS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, names in COMMANDS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(section):
                formatter.write_dl(
                    [(f"{name:<9}", one.get_short_help_str(limit=100)) for name, one in commands if one]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LOCATIONS:
            return None
        module, _, name = _LOCATIONS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DalSegnoError as error:
            raise click.ClickException(error.message) from error
        except KeyboardInterrupt:  # the usual end of `log --follow`; click would print "Aborted!"
            ctx.exit(EX_INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dalsegno", message="%(version)s")
def main() -> None:
    """Dal Segno: an event-sourced, replayable server for composite models."""


@click.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    click.echo(version("dalsegno"))
