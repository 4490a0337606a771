"""Figures of a benchmark, and the report: ratios first."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

RATIO: Final = "x"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. The unit of a ratio is `x`; `note` gives the values behind it."""

    name: str
    value: float
    unit: str
    note: str = ""

    def line(self) -> str:
        return f"  {self.name:<58} {_digits(self.value):>9} {self.unit:<5} {self.note}".rstrip()


def spread(name: str, values: Sequence[float], unit: str, note: str = "") -> Figure:
    """The median of several rounds, with their minimum and maximum in the note."""
    between = f"{_digits(min(values))} to {_digits(max(values))}"
    return Figure(name, median(values), unit, f"{between}; {note}" if note else between)


def show(figures: dict[str, list[Figure]]) -> None:
    """Print all figures: every ratio first, then the rest by measurement."""
    ratios = [figure for group in figures.values() for figure in group if figure.unit == RATIO]
    if ratios:
        print("ratios")
        print("\n".join(figure.line() for figure in ratios))
    for name, group in figures.items():
        if rest := [figure for figure in group if figure.unit != RATIO]:
            print(name)
            print("\n".join(figure.line() for figure in rest))


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
