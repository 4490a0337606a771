"""Cuts a file at its pauses, into windows that a model takes. For models that tell no times. No torch.

The level of a file is computed for each 20 ms while it is read through. A window ends in the quietest tenth
of a second of its last quarter, the last one if there are several. So a cut seldom divides a word, and it
depends on the samples alone.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from models.speech_to_text.mel import RATE

Floats = npt.NDArray[np.float32]

_HOP: Final = RATE // 50
"""The samples of a level."""
_NEARBY: Final = 5
"""The levels whose mean is compared: a tenth of a second."""
_TAIL: Final = 8
"""What follows a window is at least an eighth as long."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file.

    Attributes:
        first: its first sample.
        count: its samples.
        loudest: the level of its loudest 20 ms: the root of the mean square of samples from -1 to 1.
    """

    first: int
    count: int
    loudest: float


@dataclass(slots=True, eq=False)
class Levels:
    """The levels of a file that comes in blocks.

    Attributes:
        samples: the number of samples so far.
    """

    samples: int = 0
    _rest: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    _found: list[Floats] = field(default_factory=list)

    def add(self, block: Floats) -> None:
        """Take the next samples, (N,)."""
        self.samples += len(block)
        rest = np.concatenate([self._rest, block])
        whole = len(rest) // _HOP * _HOP
        self._take(rest[:whole].reshape(-1, _HOP))
        self._rest = rest[whole:].copy()

    def _take(self, parts: Floats) -> None:
        self._found.append(np.sqrt(np.square(parts).mean(axis=1)))

    def windows(self, longest: int) -> list[Window]:
        """Cut the whole file.

        Args:
            longest: the most samples of a window, at least 4 s.

        Returns:
            the windows in order, without gaps; a file that is not longer than `longest` is one.
        """
        if len(self._rest):
            self._take(self._rest[None])
            self._rest = self._rest[:0]
        levels = np.concatenate([*self._found, np.empty(0, np.float32)])
        found, first = [], 0
        while first < self.samples:
            count = self.samples - first
            if count > longest:
                count = _cut(levels, first, longest, self.samples) - first
            inside = levels[first // _HOP : -(-(first + count) // _HOP)]
            found.append(Window(first=first, count=count, loudest=round(float(inside.max()), 6)))
            first += count
        return found


def _cut(levels: Floats, first: int, longest: int, samples: int) -> int:
    """Where a window that begins at `first` ends: the middle of the quietest stretch."""
    begin = (first + longest * 3 // 4) // _HOP
    end = min(first + longest, samples - longest // _TAIL) // _HOP
    nearby = np.convolve(levels[begin:end], np.ones(_NEARBY, np.float32), mode="valid")[::-1]
    return (end - int(nearby.argmin()) - _NEARBY // 2) * _HOP
