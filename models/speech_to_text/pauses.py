"""Cuts a file at its pauses, into windows that a model takes. For models that tell no times. No torch.

The level of each tenth of a second is computed while the file is read through. A window ends before the
quietest one of its last part, the first one if there are several. So a cut seldom divides a word, and it
depends on the samples alone. It is the rule of transformers' `CohereAsrFeatureExtractor`.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from models.speech_to_text.mel import RATE

Floats = npt.NDArray[np.float32]

STEP: Final = RATE // 10
"""The samples of a level. Windows begin at multiples of it."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file.

    Attributes:
        first: its first sample.
        count: its samples.
        loudest: the level of its loudest tenth of a second: the root of the mean square of samples from -1 to
            1.
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
        whole = len(rest) // STEP * STEP
        self._take(rest[:whole].reshape(-1, STEP))
        self._rest = rest[whole:].copy()

    def _take(self, parts: Floats) -> None:
        self._found.append(np.sqrt(np.square(parts).mean(axis=1)))

    def windows(self, longest: int, search: int) -> list[Window]:
        """Cut the whole file.

        Args:
            longest: the most samples of a window.
            search: the last samples of a window, among which its end is searched.

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
                begin, end = (first + longest - search) // STEP, (first + longest) // STEP - 1
                count = (begin + int(levels[begin:end].argmin())) * STEP - first
            inside = levels[first // STEP : -(-(first + count) // STEP)]
            found.append(Window(first=first, count=count, loudest=round(float(inside.max()), 6)))
            first += count
        return found
