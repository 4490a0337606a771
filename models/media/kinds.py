"""The values that decoding gives and takes: videos, the choice of their frames, limits, errors.

Imports neither numpy nor a decoder: `models.base` uses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from shared.errors import ClientError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shared.events import Media


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The limits of one medium. A medium beyond one of them is refused before it is decoded to the end.

    Attributes:
        max_pixels: width times height of an image, or of a frame.
        max_frames: the frames that one call decodes of a video, or of an animated image.
        max_seconds: the duration of a video or audio.
        max_decoded_bytes: the size of the arrays that one call returns.
    """

    max_pixels: int = 64_000_000
    max_frames: int = 2048
    max_seconds: float = 14_400.0
    max_decoded_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """A video before its frames are chosen.

    Attributes:
        frames: the number of its frames.
        fps: the average number of frames per second; 0 if the file does not say.
        seconds: its duration; 0 if unknown.
        width, height: the size of a frame in pixels, as stored: a file that is rotated by 90 degrees has
            frames of `height` by `width`.
    """

    frames: int
    fps: float
    seconds: float
    width: int
    height: int


ChooseFrames: TypeAlias = Callable[[VideoInfo], Sequence[int]]
"""Chooses the indices of the frames to decode: from 0, ascending, repetitions allowed. It must be pure: it is
called again if the file turns out to have fewer frames than it states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """The chosen frames of a video.

    Attributes:
        frames: (N, H, W, 3) uint8, RGB, rotated as the file says.
        seconds: (N,) float64, the time of each frame from the first frame of the file.
        indices: the chosen indices.
        info: the whole video.
    """

    frames: "npt.NDArray[np.uint8]"
    seconds: "npt.NDArray[np.float64]"
    indices: tuple[int, ...]
    info: VideoInfo


class MediaError(ClientError):
    """A medium cannot be used as the request uses it.

    Attributes:
        digest: the digest of the medium, where known; the worker names the part of the request by it.
    """

    code = "invalid_media"
    digest: str = ""

    def named(self, files: "Sequence[Media]") -> Self:
        """The same error, which names the part of the request: its index in `files`, and its name."""
        for index, medium in enumerate(files):
            if self.digest and medium.digest == self.digest:
                name = f" ({medium.name[:80]!r})" if medium.name else ""
                message = f"files[{index}]{name}: {self.message}"
                return type(self)(message, code=self.code, status=self.status)
        return self


class MediaTooLargeError(MediaError):
    """A medium is beyond a limit: pixels, frames, seconds, or the memory or time that decoding takes."""

    code = "media_too_large"
    status = 413


class UnsupportedMediaError(MediaError):
    """The format of a medium, or a feature of it, is not supported, or not of the expected modality."""

    code = "unsupported_media"
    status = 415
