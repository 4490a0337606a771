"""`dalsegno chat`: the command."""

import sys
from typing import Any, Final

import click

from dalsegno.ask import DEFAULT_URL

_HISTORY_LINES: Final = 1000


@click.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server's address.")
@click.option("--model", help="A model of the server. [default: its first]")
@click.option("--system", default="", help="The system's message.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Upper limit of new tokens of an answer.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--seed", type=int, help="The same seed gives the same answers.")
def chat(url: str, model: str | None, system: str, **flags: Any) -> None:
    """Talk with a running server: each message is asked with the conversation so far.

    /help lists the commands. $DALSEGNO_API_KEY is sent to servers that require a key. With a pipe as its
    input the command reads messages from it, and ends with it.
    """
    from dalsegno.ask.server import Server
    from dalsegno.chat.conversation import Conversation
    from dalsegno.chat.session import Session
    from dalsegno.config import environment

    server = Server(url=url, api_key=environment.read().api_key)
    name = model or server.first_model()
    is_typed = sys.stdin.isatty()
    if is_typed:
        _remember_lines()
        click.echo(f"{name} at {url}; /help lists the commands, Ctrl-D ends", err=True)
    session = Session(
        server=server,
        model=name,
        read_line=input if is_typed else lambda _: input(),
        show=_show,
        say=lambda line: click.echo(line, err=True),
        fields={name: value for name, value in flags.items() if value is not None},
        conversation=Conversation(system=system),
    )
    session.run()
    if is_typed:
        click.echo()


def _show(piece: str, is_thought: bool) -> None:
    """Print a piece; thoughts are dim on a terminal, and go nowhere else."""
    if not is_thought:
        click.echo(piece, nl=False)
    elif sys.stdout.isatty():
        click.echo(click.style(piece, dim=True), nl=False)


def _remember_lines() -> None:
    """Let the arrow keys bring back lines, also those of earlier sessions."""
    import atexit
    import contextlib

    from configs.seal_keys import state_dir
    from shared.errors import DalSegnoError

    try:
        import readline
    except ImportError:  # a Python without it: lines are read all the same
        return
    try:
        path = state_dir() / "chat_history"
    except DalSegnoError:  # a user without a home
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)

    def keep() -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)

    atexit.register(keep)
