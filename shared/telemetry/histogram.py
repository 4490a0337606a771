"""A histogram that is fast to update and small enough for a heartbeat.

It has Prometheus' semantics: `counts[i]` observations were at most `bounds[i]` and more than the bound
before; the last count is of all observations above the last bound. Counts only grow, so two snapshots can
be subtracted.
"""

from bisect import bisect_left
from typing import Final

import msgspec

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From the time of an ack to the time for which a client waits."""
ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Histogram(msgspec.Struct, kw_only=True):
    """The number of observations in each interval, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Return an empty histogram."""
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Add an observation, or several equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
