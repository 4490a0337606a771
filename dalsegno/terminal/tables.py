"""Tables of text: plain and stable through a pipe; fitted to a width, and coloured on a terminal, by rich.

Cells may hold text that clients wrote: it is sanitised and never read as rich's markup. rich is imported only
to fit a table to a width, because its import takes 50 ms and its layout 0.5 ms a row
(docs/adr/0024-libraries.md).
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import click

from dalsegno.terminal.sanitise import plain

Cell: TypeAlias = str | tuple[str, str]
"""A text, or a text and its style on a terminal."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column; in plain output it is at least `width` wide, so that its place does not change."""

    title: str
    width: int = 0
    is_right: bool = False


def plain_lines(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """The table in plain text: one line a row, as wide as it is."""
    texts = [[column.title for column in columns]]
    texts += [[plain(cell if isinstance(cell, str) else cell[0]) for cell in row] for row in rows]
    widths = [
        max(one.width, *map(len, cells)) for one, cells in zip(columns, zip(*texts, strict=True), strict=True)
    ]
    return [
        "  ".join(
            text.rjust(width) if column.is_right else text.ljust(width)
            for column, text, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in texts
    ]


def fitted_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], width: int, *, is_coloured: bool = False
) -> list[str]:
    """The table in lines of at most `width` columns: long cells wrap. Colours are those of a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold" if is_coloured else "")
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.is_right else "left", overflow="fold")
    for row in rows:
        cells = (cell if isinstance(cell, tuple) else (cell, "") for cell in row)
        table.add_row(*(Text(plain(text), style) for text, style in cells))
    console = Console(width=width, force_terminal=is_coloured, no_color=None if is_coloured else True)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def show(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table to stdout: fitted to a terminal and coloured there, else plain."""
    if sys.stdout.isatty():
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        lines = fitted_lines(columns, rows, width, is_coloured=True)
    else:
        lines = plain_lines(columns, rows)
    click.echo("\n".join(lines))
