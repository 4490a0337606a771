"""Decoding of chosen frames of a video with PyAV, and of animated images with pillow.

A source yields frame by frame, so that the process that decodes holds one of them at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.stream import VideoStream

from models.media.chosen_frames import Frame, VideoSource
from models.media.containers import av_reported, check_codec, open_container
from models.media.detection import HEAD_BYTES, format_of
from models.media.images import Animation, as_rgb, check_pixels, reported
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError, VideoInfo

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


class _Animated:
    """An image as a video."""

    def __init__(self, file: BinaryIO, limits: MediaLimits) -> None:
        self._animation = Animation(file, limits)
        count = self._animation.count
        check_count(count, limits)
        width, height = self._animation.size
        seconds = self._animation.seconds(limits.max_seconds)
        fps = count / seconds if seconds else 0.0
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
