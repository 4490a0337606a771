"""`dalsegno transcribe`: the command."""

from pathlib import Path
from typing import Any

import click

from dalsegno.ask import DEFAULT_URL


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server's address.")
@click.option("--model", help="A model of the server. [default: its first]")
@click.option("--language", help="The language that is spoken, such as en. [default: detected]")
@click.option("--translate", is_flag=True, help="Write English, whatever is spoken.")
@click.option("--prompt", help="Names and words that may occur.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "verbose_json", "srt", "vtt"]),
    help="Text, JSON, or subtitles. [default: by the name of --out, or else text]",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file, not to the terminal."
)
def transcribe(out: Path | None, form: str | None, **flags: Any) -> None:
    """Write down what is said in FILE: sound, or a video with a sound track.

    Text is printed as it is heard. $DALSEGNO_API_KEY is sent to servers that require a key.
    """
    from dalsegno.ask.server import Server
    from dalsegno.config import environment
    from dalsegno.transcribe.request import Transcription, pieces

    server = Server(url=flags.pop("url"), api_key=environment.read().api_key)
    if form is None:
        named = "" if out is None else out.suffix.lstrip(".").lower()
        form = named if named in ("json", "srt", "vtt") else "text"
    found = pieces(server, Transcription(form=form, is_stream=out is None, **flags))
    if out is not None:
        text = "".join(found)
        out.write_text(text, encoding="utf-8")
        click.echo(str(out))
        return
    last = "\n"
    try:
        for piece in found:
            click.echo(piece, nl=False)
            last = piece
    finally:
        if not last.endswith("\n"):
            click.echo()
