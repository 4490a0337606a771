"""Decoding of chosen frames of a video with PyAV, and of animated images with pillow.

A source yields frame by frame, so that the process that decodes holds one of them at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.stream import VideoStream

from models.media.containers import av_reported, check_codec, open_container
from models.media.detection import HEAD_BYTES, format_of
from models.media.images import Animation, as_rgb, check_pixels, reported
from models.media.kinds import (
    ChooseFrames,
    MediaError,
    MediaLimits,
    MediaTooLargeError,
    UnsupportedMediaError,
    Video,
    VideoInfo,
)

CODECS: Final = frozenset(
    {
        "h264",
        "hevc",
        "av1",
        "libdav1d",
        "vp8",
        "vp9",
        "libvpx",
        "libvpx-vp9",
        "mpeg4",
        "mpeg2video",
        "mpeg1video",
    }
    | {"mjpeg", "gif", "prores", "theora", "h263"}
)
"""The video codecs that are decoded."""
FRAMES_PER_SECOND: Final = 240
"""The most frames of a file per second that it may last (`MediaLimits.max_seconds`)."""

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


@contextmanager
def open_video(file: BinaryIO, limits: MediaLimits) -> Iterator[VideoSource]:
    """Open a video, or an image as a video of its frames.

    Raises:
        MediaError: the file is damaged, no video, or beyond a limit.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    found = format_of(head)
    if found is not None and found.pillow and not found.demuxer:
        yield _Animated(file, limits)
        return
    with open_container(file, "a video (MP4, MOV, WebM, MKV or GIF)") as container:
        yield _Contained(container, limits)


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


class _Animated:
    """An image as a video."""

    def __init__(self, file: BinaryIO, limits: MediaLimits) -> None:
        self._animation = Animation(file, limits)
        count, fps = self._animation.count, self._animation.fps
        check_count(count, limits)
        width, height = self._animation.size
        seconds = count / fps if fps and count > 1 else 0.0
        self.info = VideoInfo(frames=count, fps=fps, seconds=seconds, width=width, height=height)
        self.seen = 0

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        wanted = set(indices)
        self.seen = 0
        for seconds, image in self._animation.frames():
            index, self.seen = self.seen, self.seen + 1
            if index in wanted:
                with reported():
                    pixels = as_rgb(image)
                yield seconds, pixels
            if self.seen > indices[-1]:
                return


class _Contained:
    """A video stream of a container."""

    def __init__(self, container: InputContainer, limits: MediaLimits) -> None:
        self._container = container
        self._limits = limits
        self._stream = _video_stream(container)
        self.seen = 0
        with av_reported():
            self.info = self._read_info()

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        wanted, last = set(indices), indices[-1]
        self.seen, first_s = 0, None
        with av_reported():
            self._container.seek(0)
            self._stream.codec_context.flush_buffers()
            for frame in self._container.decode(self._stream):
                index, self.seen = self.seen, self.seen + 1
                time_s = float(frame.time) if frame.pts is not None else index / (self.info.fps or 1)
                first_s = time_s if first_s is None else first_s
                if index in wanted:
                    check_pixels(frame.width, frame.height, self._limits)
                    pixels: npt.NDArray[Any] = frame.to_ndarray(format="rgb24")
                    yield time_s - first_s, _rotated(pixels, frame.rotation)
                if index == last:
                    return

    def _read_info(self) -> VideoInfo:
        stream, container = self._stream, self._container
        seconds = 0.0
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            seconds = container.duration / av.time_base
        if seconds > self._limits.max_seconds:
            raise MediaTooLargeError(
                f"expected at most {self._limits.max_seconds:g} s (media.max_seconds), found {seconds:.0f} s"
            )
        check_pixels(stream.width, stream.height, self._limits)
        frames = 0
        for packet in container.demux(stream):
            frames += packet.size > 0
            check_count(frames, self._limits)
        if not frames:
            raise MediaError("expected a video with frames, found none")
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        width, height = stream.width, stream.height
        return VideoInfo(frames=frames, fps=fps, seconds=seconds, width=width, height=height)


def check_count(frames: int, limits: MediaLimits) -> None:
    """Check the number of a file's frames.

    Raises:
        MediaTooLargeError: there are more than a video of `max_seconds` may have.
    """
    most = int(limits.max_seconds * FRAMES_PER_SECOND)
    if frames > most:
        raise MediaTooLargeError(
            f"expected at most {most} frames, {FRAMES_PER_SECOND} per second of media.max_seconds; found more"
        )


def _video_stream(container: InputContainer) -> VideoStream:
    streams = [one for one in container.streams.video if not _is_cover(one)]
    if not streams:
        raise UnsupportedMediaError("expected a video, found a file without a video stream")
    stream = streams[0]
    check_codec(stream, CODECS)
    stream.codec_context.thread_count = 1
    return stream


def _is_cover(stream: Any) -> bool:
    """True for the cover picture of a song."""
    return bool(int(stream.disposition) & 0x400)


def _rotated(pixels: npt.NDArray[np.uint8], degrees: float) -> npt.NDArray[np.uint8]:
    """Rotate counterclockwise by the nearest multiple of 90 degrees."""
    turns = round(degrees / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
