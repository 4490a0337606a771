"""Log-mel features of Whisper, computed window by window: the same as of the whole file. No torch.

A frame is a Fourier transform of 400 samples around every 160th one, summed to mel bands, as logarithms to
the base 10. They are clipped at 8 below the largest value *of the file*, and scaled to about -1 to 1. So a
first pass over the file finds the largest value, and a window needs but its own samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

RATE: Final = 16_000
"""The samples per second that the features are computed of."""
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0
_BATCH: Final = 3000
"""The frames that are transformed at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MelSettings:
    """The settings of a checkpoint (`preprocessor_config.json`).

    Attributes:
        hop: samples between two frames.
        size: samples of a frame.
        frames: frames of a window.
        filters: (size // 2 + 1, bands), the share of each frequency in each band.
    """

    hop: int
    size: int
    frames: int
    filters: Floats

    @property
    def samples(self) -> int:
        """The samples of a window."""
        return self.hop * self.frames

    @classmethod
    def of(cls, extractor: Any) -> "MelSettings":
        """The settings of transformers' `WhisperFeatureExtractor`."""
        return cls(
            hop=int(extractor.hop_length),
            size=int(extractor.n_fft),
            frames=int(extractor.nb_max_frames),
            filters=np.asarray(extractor.mel_filters, np.float32),
        )

    def logarithms(self, samples: Floats) -> Floats:
        """Log-mel values of frames, (bands, frames), that begin at every `hop`-th of the samples, (N,)."""
        window = np.hanning(self.size + 1)[:-1].astype(np.float32)
        count = (len(samples) - self.size) // self.hop + 1
        if count < 1:
            return np.empty((self.filters.shape[1], 0), np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(samples, self.size)[:: self.hop][:count]
        found = []
        for first in range(0, count, _BATCH):
            power = np.abs(np.fft.rfft(frames[first : first + _BATCH] * window)) ** 2
            found.append(np.log10(np.maximum(power.astype(np.float32) @ self.filters, _FLOOR)).T)
        return np.concatenate(found, axis=1)


@dataclass(slots=True, kw_only=True, eq=False)
class LoudestFrame:
    """The largest log-mel value of a file that comes in blocks.

    Attributes:
        samples: the number of samples so far.
        value: the largest value so far.
    """

    settings: MelSettings
    samples: int = 0
    value: float = float(np.log10(_FLOOR))
    _rest: Floats = field(default_factory=lambda: np.empty(0, np.float32))

    def add(self, block: Floats) -> None:
        """Take the next samples, (N,)."""
        half = self.settings.size // 2
        if not self.samples:
            block_before = block[1 : half + 1][::-1]
            self._rest = np.pad(block_before, (half - len(block_before), 0))
        self.samples += len(block)
        self._rest = np.concatenate([self._rest, block])
        if len(self._rest) >= self.settings.samples:
            self._take()

    def finish(self) -> float:
        """The largest value of the whole file, with what the features have behind its end."""
        half, silence = self.settings.size // 2, max(self.settings.samples - self.samples, 0)
        self._rest = np.pad(self._rest, (0, min(silence, self.settings.size)))
        self._rest = np.pad(self._rest, (0, half), mode="reflect" if len(self._rest) > half else "constant")
        self._take()
        return self.value

    def _take(self) -> None:
        hop, size = self.settings.hop, self.settings.size
        count = (len(self._rest) - size) // hop + 1
        if count > 0:
            self.value = max(self.value, float(self.settings.logarithms(self._rest).max()))
            self._rest = self._rest[count * hop :]


ReadSamples = Callable[[int, int], Floats]
"""Reads samples of a file by the index of the first one, and their number; fewer at its end."""


def window_features(
    settings: MelSettings, read: ReadSamples, *, samples: int, first: int, loudest: float
) -> Floats:
    """The features of a window, (bands, frames) float32.

    A file that is not longer than a window is followed by silence. The last window of a longer one has zeros
    in place of the frames that it lacks, as in the published code.

    Args:
        settings: of the checkpoint.
        read: reads samples of the file.
        samples: the number of samples of the file.
        first: the first frame.
        loudest: the largest log-mel value of the file.
    """
    half, is_short = settings.size // 2, samples <= settings.samples
    total = settings.samples if is_short else samples
    count = min(settings.frames, total // settings.hop - first)
    begin, end = first * settings.hop - half, (first + count - 1) * settings.hop + half
    found = read(max(begin, 0), min(end, samples) - max(begin, 0))
    if is_short:
        found = np.pad(found, (0, max(0, min(end, total) - max(begin, 0) - len(found))))
    padding = max(-begin, 0), max(0, end - max(begin, 0) - len(found))
    found = np.pad(found, padding, mode="reflect")
    logarithms = np.maximum(settings.logarithms(found), np.float32(loudest - _RANGE))
    features = ((logarithms + 4.0) / 4.0).astype(np.float32)[:, :count]
    return np.pad(features, ((0, 0), (0, settings.frames - features.shape[1])))
