"""Time limits, by the log's own clock: which of them to say are over. Pure; our clock is handed in.

A limit counts by the time at which the log stores that it has passed. What that clock says now is guessed:
a record was stored at least as long ago as it took to get here, so of all records read the one that says
the latest time is the best guess, carried on by our clock. Where the guess was early (the log's clock went
back) the record counts for nothing, and tells better; it is said again when the rest is over.
"""

from collections.abc import Iterable
from typing import Final

from conductor.core.react import Deadline

_NS_PER_S: Final = 1_000_000_000


class Timers:
    """The limits, as the leader sees them: what was said of them, and what is to be said."""

    def __init__(self) -> None:
        self._seq = 0
        self._read_ns = 0
        self._ahead_ns: int | None = None
        self._said: dict[Deadline, int | None] = {}

    def lead(self) -> None:
        """A new term: what was said in an earlier one may be void."""
        self._said = {}

    def read(self, seq: int, time_ns: int, now_s: float) -> None:
        """A record was folded now: its position, and when it was stored."""
        self._seq = seq
        self._read_ns = time_ns - round(now_s * _NS_PER_S)
        self._ahead_ns = self._read_ns if self._ahead_ns is None else max(self._ahead_ns, self._read_ns)

    def due(self, deadlines: Iterable[Deadline], now_s: float) -> list[Deadline]:
        """Of the limits there are, those to be said to be over now."""
        listed = list(deadlines)
        said = {one: self._said[one] for one in listed if one in self._said}
        void = [one for one, seq in said.items() if seq is not None and seq <= self._seq]
        if void:  # it was read, and the limit still stands
            self._ahead_ns = self._read_ns
        self._said = {one: seq for one, seq in said.items() if one not in void}
        if self._ahead_ns is None:
            return []
        now_ns = self._ahead_ns + round(now_s * _NS_PER_S)
        return [one for one in listed if one.at_ns <= now_ns and one not in self._said]

    def next_s(self, deadlines: Iterable[Deadline], now_s: float) -> float | None:
        """Seconds until the next limit is over that was not said to be; None without one.

        Only a record that is read, or the ack of what was said, makes it sooner.
        """
        if self._ahead_ns is None:
            return None
        now_ns = self._ahead_ns + round(now_s * _NS_PER_S)
        left_ns = [one.at_ns - now_ns for one in deadlines if one not in self._said]
        return max(min(left_ns), 0) / _NS_PER_S if left_ns else None

    def say(self, deadline: Deadline) -> None:
        """It is on its way into the log."""
        self._said[deadline] = None

    def stored(self, deadline: Deadline, seq: int) -> None:
        """It was stored at `seq`."""
        if deadline in self._said:
            self._said[deadline] = seq
