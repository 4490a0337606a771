"""The options of commands that take a trace, and the reading of the trace that they describe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dalsegno.traces.calls import Trace, timed
from dalsegno.traces.formats import FORMATS, Format
from dalsegno.traces.formats import read as read_trace

_Command = TypeVar("_Command", bound=Callable[..., Any])


def of_trace(command: _Command) -> _Command:
    """Add the options `--format` (`form`) and `--rate` to a command."""
    form = click.option(
        "--format", "form", type=click.Choice(FORMATS), help="Of a trace. [default: by its contents]"
    )
    rate = click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True),
        metavar="PER_SECOND",
        help="Of a trace without times: requests per second, at random distances. [default: all at once]",
    )
    return form(rate(command))


def read(path: Path, form: Format | None, rate: float | None) -> Trace:
    """Read a trace whose requests have times.

    Raises:
        TraceError: it is no trace, or `rate` is given and it has times of its own.
    """
    return timed(read_trace(path, form), rate)


def left_out(trace: Trace) -> str:
    """Say how many requests of a trace are not repeated."""
    many = trace.left_out != 1
    return (
        f"{trace.left_out:,} {'requests' if many else 'request'} of the trace {'are' if many else 'is'} left "
        "out: without an answer"
    )
