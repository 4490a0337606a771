"""Time limits, by the log's clock: the choice of those to record as passed. Pure: the caller passes the time.

A limit has passed when the log stores the event that says so at or after the limit. The log's current time
is estimated: a record was stored no later than it arrived here, so the latest storage time of all read
records, advanced by our own clock, is the best estimate. If the estimate was early (the log's clock went
back), the event has no effect, improves the estimate, and is repeated when the remaining time is over.
"""

from collections.abc import Iterable
from typing import Final

from conductor.core.react import Deadline

_NS_PER_S: Final = 1_000_000_000


class Timers:
    """The time limits as the leader sees them: those recorded as passed, and those still to come."""

    def __init__(self) -> None:
        self._seq = 0
        self._read_ns = 0
        self._ahead_ns: int | None = None
        self._sent: dict[Deadline, int | None] = {}

    def start_term(self) -> None:
        """Start a new term: events of an earlier term may be void."""
        self._sent = {}

    def read(self, seq: int, time_ns: int, now_s: float) -> None:
        """Note the position and storage time of a record that was just folded."""
        self._seq = seq
        self._read_ns = time_ns - round(now_s * _NS_PER_S)
        self._ahead_ns = self._read_ns if self._ahead_ns is None else max(self._ahead_ns, self._read_ns)

    def due(self, deadlines: Iterable[Deadline], now_s: float) -> list[Deadline]:
        """The limits to record as passed now."""
        listed = list(deadlines)
        sent = {one: self._sent[one] for one in listed if one in self._sent}
        void = [one for one, seq in sent.items() if seq is not None and seq <= self._seq]
        if void:  # the event was read and had no effect
            self._ahead_ns = self._read_ns
        self._sent = {one: seq for one, seq in sent.items() if one not in void}
        if self._ahead_ns is None:
            return []
        now_ns = self._ahead_ns + round(now_s * _NS_PER_S)
        return [one for one in listed if one.at_ns <= now_ns and one not in self._sent]

    def next_s(self, deadlines: Iterable[Deadline], now_s: float) -> float | None:
        """Seconds until the next limit that is not recorded as passed; None without one.

        Only a new record, or the acknowledgement of an event of ours, shortens it.
        """
        if self._ahead_ns is None:
            return None
        now_ns = self._ahead_ns + round(now_s * _NS_PER_S)
        left_ns = [one.at_ns - now_ns for one in deadlines if one not in self._sent]
        return max(min(left_ns), 0) / _NS_PER_S if left_ns else None

    def mark_sent(self, deadline: Deadline) -> None:
        """Note that the event of a limit was sent to the log."""
        self._sent[deadline] = None

    def stored(self, deadline: Deadline, seq: int) -> None:
        """Note that the event of a limit was stored at `seq`."""
        if deadline in self._sent:
            self._sent[deadline] = seq
