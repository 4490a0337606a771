"""A histogram that is cheap to add to, and small enough to ride in a beat.

Prometheus' own meaning: `counts[i]` observations were at most `bounds[i]` (and more than the bound before),
the last count is of all above the last bound. Only ever added to, so whoever reads two of them can subtract.
"""

from bisect import bisect_left
from typing import Final

import msgspec

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From what an ack takes to what a client waits for."""
ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Histogram(msgspec.Struct, kw_only=True):
    """Observations by size, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> "Histogram":
        """An empty one."""
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Add an observation, or several of one size."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
