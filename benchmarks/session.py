"""Measurements of which each figure is printed at once: for machines that are lent for minutes."""

import time
import traceback
from collections.abc import Callable, Iterable
from typing import Final

from benchmarks.report import Figure

MINUTES: Final = 9.0
"""A command on a lent machine has ten."""


class Session:
    """Prints each figure as soon as it is measured. What fails is named, and the rest goes on.

    Args:
        minutes: nothing begins later.

    Attributes:
        figures: those that were measured.
    """

    def __init__(self, minutes: float) -> None:
        self._ends_s = time.monotonic() + 60 * minutes
        self.figures: Final[list[Figure]] = []

    def measure(self, name: str, work: Callable[[], Iterable[Figure]]) -> None:
        """Measure something, if there is time."""
        if time.monotonic() > self._ends_s:
            print(f"  {name}: not measured, the time is up", flush=True)
            return
        try:
            for figure in work():
                self.figures.append(figure)
                print(figure.line(), flush=True)
        except Exception:  # noqa: BLE001 - the rest is measured nevertheless
            print(f"  FAILED: {name}\n{traceback.format_exc(limit=-4)}", flush=True)
