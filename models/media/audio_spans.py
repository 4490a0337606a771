"""A part of a file's audio: as a slice of the whole, but only the part is decoded.

The file is read from a place a little before the part: codecs need what comes before, and so does the filter
that changes the rate. The part begins at a sample of the file that is a sample at the new rate, too, so the
filter computes what it computes in the whole file. Containers whose time stamps are rounded to milliseconds
(WebM) are exact to a millisecond.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, BinaryIO, Final

import numpy as np
from av import AudioFrame
from av.audio.resampler import AudioResampler

from models.media.audio import open_sound
from models.media.containers import av_reported
from models.media.kinds import MediaLimits
from models.media.waveforms import Samples

_BEFORE_S: Final = 1.0
"""What is decoded before the part, in seconds: several frames of each codec, and the length of the filter."""
_AFTER_S: Final = 0.1
"""What is decoded after it."""


def audio_span(file: BinaryIO, rate: int, first: int, count: int, limits: MediaLimits) -> Samples:
    """Decode samples `first` to `first + count` of `decode_audio`; fewer at the end of the file.

    Raises:
        MediaError: the file is damaged, has no audio, or is beyond a limit.
    """
    begin_s, end_s = max(first / rate - _BEFORE_S, 0.0), (first + count) / rate + _AFTER_S
    part = _read(file, rate, begin_s, end_s, limits, seeks=True) if begin_s > _BEFORE_S else None
    part = part or _read(file, rate, begin_s, end_s, limits, seeks=False)
    if part is None:
        return np.empty(0, np.float32)
    skipped = -part.start % (part.rate // gcd(part.rate, rate))
    found = _at_rate(part.samples[skipped:], part.rate, rate)
    before = first - (part.start + skipped) * rate // part.rate
    return found[max(before, 0) : max(before + count, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Decoded samples, mixed to one channel, at the rate of the file, from its sample `start` on."""

    samples: Samples
    start: int
    rate: int


def _read(
    file: BinaryIO, rate: int, begin_s: float, end_s: float, limits: MediaLimits, *, seeks: bool
) -> _Part | None:
    """Decode from a place before `begin_s` to one after `end_s`.

    Returns:
        None if there are no samples there, or if the file cannot be read from a place before them.
    """
    file.seek(0)
    with open_sound(file, rate, limits) as (container, stream), av_reported():
        own: int = stream.codec_context.sample_rate
        origin = _seek(container, stream, begin_s) if seeks else 0.0
        mix = AudioResampler(format="flt", layout="mono", rate=own)
        blocks: list[Samples] = []
        start = place = -1 if seeks else 0
        for frame in container.decode(stream):
            if place < 0:
                start = place = _place_of(frame, origin, own)
                if not 0 <= place <= begin_s * own:
                    return None
            place += frame.samples
            if place <= begin_s * own:
                start = place
            else:
                frame.pts = None
                blocks += [one.to_ndarray().reshape(-1).astype(np.float32) for one in mix.resample(frame)]
            if place >= end_s * own:
                break
    return _Part(np.concatenate(blocks), start, own) if blocks else None


def _seek(container: Any, stream: Any, seconds: float) -> float:
    """Go to a place before `seconds` from the first sample of the file; return the time of that sample."""
    first = next(iter(container.decode(stream)), None)
    origin = 0.0 if first is None or first.pts is None else float(first.pts * first.time_base)
    container.seek(int((origin + seconds) / stream.time_base), stream=stream, backward=True)
    return origin


def _place_of(frame: Any, origin: float, rate: int) -> int:
    """The index of a frame's first sample in the file; -1 if its time is not known."""
    return -1 if frame.pts is None else round((float(frame.pts * frame.time_base) - origin) * rate)


def _at_rate(samples: Samples, own: int, rate: int) -> Samples:
    """Change the rate of samples, (N,)."""
    if own == rate:
        return samples
    frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="flt", layout="mono")
    frame.sample_rate = own
    resampler = AudioResampler(format="flt", layout="mono", rate=rate)
    blocks = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([one.to_ndarray().reshape(-1) for one in blocks]).astype(np.float32)
