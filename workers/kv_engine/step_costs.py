"""What steps without prompts cost, by their number of rows, as it was measured. Pure: reads no clock."""

from typing import Final

_WEIGHT: Final = 0.2
"""The weight of the newest step in the moving averages, which cover about ten steps."""


class StepCosts:
    """The durations of steps, learned for each order of magnitude of their rows."""

    def __init__(self) -> None:
        # By order of magnitude: the average number of rows, and their average cost in s.
        self._known: dict[int, tuple[float, float]] = {}

    def observe(self, rows: int, took_s: float) -> None:
        """Learn from a step that was run."""
        size = rows.bit_length()
        number, known_s = self._known.get(size, (None, None))
        self._known[size] = average(number, rows), average(known_s, took_s)

    def forget_larger(self, rows: int, kept: float) -> None:
        """Let the costs of more rows approach that of so many: they have not been measured for a while.

        Args:
            rows: a number of rows.
            kept: the share of the difference that stays, below 1.
        """
        if (known_s := self.of(rows)) is None:
            return
        for size, (number, larger_s) in self._known.items():
            if number > rows and larger_s > known_s:
                self._known[size] = number, known_s + kept * (larger_s - known_s)

    def of(self, rows: int) -> float | None:
        """Return the cost of so many rows, on the line through the two nearest observed numbers."""
        nearest = sorted(self._known.values(), key=lambda seen: abs(seen[0] - rows))[:2]
        if len(nearest) < 2:
            return nearest[0][1] if nearest else None
        (few, few_s), (many, many_s) = sorted(nearest)
        slope_s = max(0.0, (many_s - few_s) / (many - few))  # noise must not make more rows cost less
        return max(few_s, many_s + slope_s * (rows - many))


def average(before: float | None, now: float) -> float:
    """Return a moving average after one more value."""
    return now if before is None else before + _WEIGHT * (now - before)
