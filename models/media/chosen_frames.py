"""The choice of frames of a video, and their collection in one array; independent of who decodes them.

Imports no decoder: a worker uses it on frames that another process decodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from models.media.kinds import (
    ChooseFrames,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    UnsupportedMediaError,
    Video,
    VideoInfo,
)

Frame: TypeAlias = "tuple[float, npt.NDArray[np.uint8]]"
"""The time of a frame from the first one, in seconds, and its pixels, (H, W, 3) RGB."""


class VideoSource(Protocol):
    """An open video."""

    @property
    def info(self) -> VideoInfo: ...
    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Decode frames from the beginning up to the last of `indices`, ascending and without repetition.

        It ends early if the file has fewer frames; `seen` is then the number of its frames.
        """
        ...

    @property
    def seen(self) -> int:
        """The number of frames that the last call of `frames` has decoded, the chosen ones and the others."""
        ...


def read_video(source: VideoSource, choose: ChooseFrames, limits: MediaLimits) -> Video:
    """Choose frames of a source and decode them.

    Raises:
        MediaError: the file is damaged, or the chosen frames are beyond a limit.
    """
    info = source.info
    while True:
        indices = check_choice(choose(info), info, limits)
        found = _collect(indices, source.frames(sorted(set(indices))))
        if found is not None:
            frames, seconds = found
            return Video(frames=frames, seconds=seconds, indices=indices, info=info)
        if not 0 < source.seen < info.frames:
            raise MediaError(f"expected {info.frames} frames, found {source.seen}")
        info = replace(info, frames=source.seen)


def check_choice(chosen: Sequence[int], info: VideoInfo, limits: MediaLimits) -> tuple[int, ...]:
    """The chosen indices, checked.

    Raises:
        MediaTooLargeError: they are too many, or their frames too large together.
        ValueError: an index is outside of the video: an error of the family.
    """
    indices = tuple(int(index) for index in chosen)
    if not indices or min(indices) < 0 or max(indices) >= info.frames or list(indices) != sorted(indices):
        raise ValueError(f"expected ascending indices from 0 to {info.frames - 1}, found {indices[:8]}")
    nbytes = len(indices) * info.width * info.height * 3
    if len(indices) > limits.max_frames:
        raise MediaTooLargeError(
            f"expected at most {limits.max_frames} frames (media.max_frames), found {len(indices)} to decode"
        )
    if nbytes > limits.max_decoded_bytes:
        raise MediaTooLargeError(
            f"expected frames of at most {limits.max_decoded_bytes:,} bytes together, found {len(indices)} "
            f"of {info.width} x {info.height}: send a smaller video, or ask for fewer frames"
        )
    return indices


def _collect(
    indices: tuple[int, ...], frames: Iterator[Frame]
) -> "tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]] | None":
    """The frames in one array; None if there are fewer than chosen."""
    seconds = np.zeros(len(indices))
    found: npt.NDArray[np.uint8] | None = None
    at = 0
    for time_s, frame in frames:
        if found is None:
            found = np.empty((len(indices), *frame.shape), np.uint8)
        if frame.shape != found.shape[1:]:
            raise UnsupportedMediaError(
                f"expected frames of one size, found {found.shape[2]} x {found.shape[1]} and "
                f"{frame.shape[1]} x {frame.shape[0]}"
            )
        repeats = indices.count(indices[at])
        found[at : at + repeats], seconds[at : at + repeats] = frame, time_s
        at += repeats
    return (found, seconds) if found is not None and at == len(indices) else None
