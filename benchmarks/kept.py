"""Figures kept in a file: a benchmark that was stopped goes on where it was, for machines lent for minutes.

    {"name": "...", "value": 1.0, "unit": "tok/s", "note": ""}     a line for each; the last of a name counts

`--keep FILE` of a benchmark reads such a file, measures what is not in it, and adds that. Delete the file to
measure anew, and after any change of the machine or of what is measured. A ratio may be of figures of two
runs.
"""

import argparse
import math
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.report import Figure


class KeptFigures:
    """The figures of a file, and those that are added to it; without a file they are kept in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        """Read the file if there is one.

        Raises:
            ValueError: a line, other than a last one that was cut off, is not a figure.
        """
        self._file: Final = file
        self._known: Final[dict[str, Figure]] = {}
        lines = file.read_bytes().split(b"\n") if file is not None and file.exists() else []
        for number, line in enumerate(lines[:-1], 1):
            try:
                figure = msgspec.json.decode(line, type=Figure)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: expected a figure, found {line!r}: {error}"
                ) from error
            self._known[figure.name] = figure
        if lines and lines[-1] and file is not None:  # the process was killed while it wrote
            file.write_bytes(b"\n".join([*lines[:-1], b""]))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Figure:
        return self._known[name]

    def keep(self, figure: Figure) -> Figure:
        """Add a figure, or replace it; NaN is not kept, and measured again next time."""
        if not math.isnan(figure.value):
            self._known[figure.name] = figure
            if self._file is not None:
                with self._file.open("ab") as lines:
                    lines.write(msgspec.json.encode(figure) + b"\n")
        return figure


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--keep FILE` to the options of a benchmark."""
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="keep each figure in this file, and measure only what it lacks",
    )
