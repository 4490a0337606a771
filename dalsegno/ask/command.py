"""`dalsegno ask`: the command."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.ask import DEFAULT_URL

if TYPE_CHECKING:
    from dalsegno.ask.chat import ChatPrompt


@click.command()
@click.argument("text")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server's address.")
@click.option("--model", help="A model of the server. [default: its first]")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Upper limit of new tokens.")
@click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option(
    "--file",
    "--image",
    "files",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="An image, audio or a video that the question is about. May be repeated.",
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Save images, sound, video and tensors of the answer here.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Ask for an image, sound or a video, by the file's extension, and save it here.",
)
@click.option(
    "--size", metavar="WIDTHxHEIGHT", help="The size of the image or video, in pixels. Needs --out."
)
@click.option("--voice", help="The voice of speech. Needs --out or --output-dir.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), help="The length of the video. Needs --out."
)
def ask(
    output_dir: Path | None,
    out: Path | None,
    size: str | None,
    seconds: float | None,
    voice: str | None,
    **flags: Any,
) -> None:
    """Send one question to a running server and print the answer as it arrives.

    TEXT is the question; `-` reads it from stdin. $DALSEGNO_API_KEY is sent to servers that require a key.
    """
    from dalsegno.ask.chat import ChatPrompt, stream_answer
    from dalsegno.config import environment

    if flags["text"] == "-":
        flags["text"] = sys.stdin.read()
    prompt = ChatPrompt(**flags, api_key=environment.read().api_key)
    if output_dir is not None and out is not None:
        raise click.UsageError("--out and --output-dir both say where to save: use one of them")
    if size is not None and out is None:
        raise click.UsageError("--size is that of an image or a video: name its file with --out")
    if seconds is not None and out is None:
        raise click.UsageError("--seconds is that of a video: name its file with --out")
    if voice is not None and out is None and output_dir is None:
        raise click.UsageError("--voice is that of speech: name its file with --out")
    if out is not None:
        _save_one(prompt, out, size, seconds, voice)
        return
    if output_dir is not None:
        _save_outputs(prompt, output_dir, voice)
        return
    has_begun = False
    try:
        for piece in stream_answer(prompt, lambda notice: click.echo(notice, err=True)):
            click.echo(piece, nl=False)
            has_begun = True
    finally:
        if has_begun:
            click.echo()


def _save_outputs(prompt: "ChatPrompt", folder: Path, voice: str | None) -> None:
    """Print the answer's text, and the paths of the files that its other outputs were saved to."""
    from dalsegno.ask.files import client_arguments
    from dalsegno.ask.outputs import ask_for_outputs
    from dalsegno.ask.progress import ProgressReport

    with _shown() as show, ProgressReport() as progress:
        saved = ask_for_outputs(
            prompt,
            folder,
            voice=voice,
            show=show,
            report=progress.say,
            **client_arguments(prompt.files),
        )
    for path in saved:
        click.echo(str(path))


def _save_one(
    prompt: "ChatPrompt", path: Path, size: str | None, seconds: float | None, voice: str | None
) -> None:
    """Print the answer's text, if there is any, and the path of the file that its image was saved to."""
    from dalsegno.ask.files import client_arguments
    from dalsegno.ask.outputs import ask_for_file
    from dalsegno.ask.progress import ProgressReport

    with _shown() as show, ProgressReport() as progress:
        saved = ask_for_file(
            prompt,
            path,
            size=size,
            seconds=seconds,
            voice=voice,
            show=show,
            report=progress.say,
            **client_arguments(prompt.files),
        )
    click.echo(str(saved))


@contextmanager
def _shown() -> Iterator[Callable[[str], None]]:
    """A function that prints a piece of a text; a text that was begun ends with its line."""
    has_begun = False

    def show(piece: str) -> None:
        nonlocal has_begun
        has_begun = True
        click.echo(piece, nl=False)

    try:
        yield show
    finally:
        if has_begun:
            click.echo()
