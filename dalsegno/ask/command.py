"""`dalsegno ask`: the command."""

import sys
from typing import Any, Final

import click

_DEFAULT_URL: Final = "http://127.0.0.1:8000"


@click.command()
@click.argument("text")
@click.option("--url", default=_DEFAULT_URL, show_default=True, help="The server's address.")
@click.option("--model", help="A model of the server. [default: its first]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Upper limit of new tokens.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
def ask(**flags: Any) -> None:
    """Send one question to a running server and print the answer as it arrives.

    TEXT is the question; `-` reads it from stdin. $DALSEGNO_API_KEY is sent to servers that require a key.
    """
    from dalsegno.ask.chat import ChatPrompt, stream_answer
    from dalsegno.config import environment

    if flags["text"] == "-":
        flags["text"] = sys.stdin.read()
    prompt = ChatPrompt(**flags, api_key=environment.read().api_key)
    has_begun = False
    try:
        for piece in stream_answer(prompt, lambda notice: click.echo(notice, err=True)):
            click.echo(piece, nl=False)
            has_begun = True
    finally:
        if has_begun:
            click.echo()
