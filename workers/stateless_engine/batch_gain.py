"""The batch sizes that pay, learnt from the time that forwards took. Pure: durations are given to it.

A forward of a GPU costs nearly the same for one call of a module and for four; a CPU that is busy with one
gains nothing by two. So the calls of one group are computed together only if that takes less time for each
of them, by a margin. What is learnt is forgotten now and then, and measured again.
"""

from collections import deque
from typing import Final

_MARGIN: Final = 0.95
"""A batch pays if a call in it takes at most this share of the time of a call by itself."""
_SAMPLES: Final = 3
"""The forwards of a size whose best time counts: single ones are slow for other reasons."""
_REMEMBERED: Final = 200
"""The forwards after which a size that was not used is measured again."""


class BatchGain:
    """The measured times of one group of calls."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._forwards = 0

    def size(self, waiting: int) -> int:
        """The number of calls to compute together, of `waiting` ones (at least 1)."""
        for size in (1, waiting):
            if not self._is_known(size):
                return size
        return min(
            (size for size in self._seconds if size <= waiting and self._is_known(size)), key=self._cost
        )

    def learn(self, size: int, seconds: float) -> None:
        """Note the duration of a forward over `size` calls."""
        self._forwards += 1
        self._seconds.setdefault(size, deque(maxlen=_SAMPLES)).append(seconds / size)
        self._measured_at[size] = self._forwards

    @property
    def gain(self) -> float:
        """The time of a call by itself, as a multiple of its time in the best batch; 1 if none pays."""
        known = [size for size in self._seconds if self._is_known(size)]
        if 1 not in known:
            return 1.0
        return max(1.0, self._time(1) / min(map(self._time, known)))

    def _is_known(self, size: int) -> bool:
        samples = self._seconds.get(size, ())
        is_recent = self._forwards - self._measured_at.get(size, 0) < _REMEMBERED
        return is_recent and len(samples) == _SAMPLES

    def _time(self, size: int) -> float:
        return min(self._seconds[size])

    def _cost(self, size: int) -> tuple[float, int]:
        return (self._time(size) * (1 if size == 1 else 1 / _MARGIN), size)
