"""The reader of media in a worker: decodes local copies in decoder processes (`models.base.MediaReader`).

What a decoder sends is checked before memory is allocated for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from models.media.chosen_frames import Frame, read_video
from models.media.kinds import ChooseFrames, MediaError, MediaLimits, MediaTooLargeError, Video, VideoInfo
from models.media.waveforms import check_rate, join
from shared.events import Media
from workers.media.decoders import DecoderLostError, Decoders, Job

_T = TypeVar("_T")

_MAX_DIMENSIONS: Final = 8
_MAX_ARRAYS: Final = 65_536


class DecodingReader:
    """Reads media of requests. Thread-safe; the calls block.

    Args:
        path_of: the verified local copy of a medium; raises `DalSegnoError` if it is gone.
    """

    def __init__(self, decoders: Decoders, path_of: Callable[[Media], Path]) -> None:
        self._decoders = decoders
        self._path_of = path_of

    def image(self, medium: Media) -> npt.NDArray[np.uint8]:
        def use(job: Job) -> npt.NDArray[np.uint8]:
            ((_, found),) = _arrays(job, self._limits)
            return found

        return self._run("image", medium, use)

    def video(self, medium: Media, *, choose: ChooseFrames) -> Video:
        def use(job: Job) -> Video:
            source = _DecodedVideo(job, self._limits)
            found = read_video(source, choose, self._limits)
            source.close()
            return found

        return self._run("video", medium, use)

    def audio(self, medium: Media, *, rate: int) -> npt.NDArray[np.float32]:
        check_rate(rate)

        def use(job: Job) -> npt.NDArray[np.float32]:
            return join([block for _, block in _arrays(job, self._limits)])

        return self._run("audio", medium, use, rate=rate)

    def audio_blocks(
        self, medium: Media, *, rate: int, take: Callable[[npt.NDArray[np.float32]], None]
    ) -> None:
        check_rate(rate)

        def use(job: Job) -> None:
            while not (message := job.receive()).get("end"):
                take(_array(job, message, self._limits.max_decoded_bytes))
            job.is_over = True

        self._run("audio", medium, use, rate=rate)

    def audio_span(self, medium: Media, *, rate: int, first: int, count: int) -> npt.NDArray[np.float32]:
        check_rate(rate)

        def use(job: Job) -> npt.NDArray[np.float32]:
            ((_, found),) = _arrays(job, self._limits)
            return found

        return self._run("audio_span", medium, use, rate=rate, first=first, count=count)

    def tensors(self, medium: Media) -> dict[str, npt.NDArray[Any]]:
        return self._run("tensors", medium, lambda job: dict(_arrays(job, self._limits)))

    def close(self) -> None:
        """End the decoders."""
        self._decoders.close()

    @property
    def _limits(self) -> MediaLimits:
        return self._decoders.limits

    def _run(self, kind: str, medium: Media, use: Callable[[Job], _T], **fields: Any) -> _T:
        with self._path_of(medium).open("rb") as file, _named(medium):
            return self._decoders.run(kind, file, use, **fields)


class _DecodedVideo:
    """A video in a decoder (`models.media.videos.VideoSource`)."""

    def __init__(self, job: Job, limits: MediaLimits) -> None:
        self._job = job
        self._limits = limits
        self.info = _info(job.receive())
        self.seen = 0

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        self._job.send({"indices": list(indices)})
        for _ in range(len(indices) + 1):
            message = self._job.receive()
            if message.get("end"):
                self.seen = int(message["seen"])
                return
            yield float(message["seconds"]), _array(self._job, message, self._limits.max_pixels * 3)
        raise DecoderLostError("more frames than were chosen")

    def close(self) -> None:
        """Let the decoder go on to its next job."""
        self._job.send({"indices": []})
        self._job.is_over = True


def _arrays(job: Job, limits: MediaLimits) -> list[tuple[str, npt.NDArray[Any]]]:
    """The arrays that a decoder sends, by name."""
    found: list[tuple[str, npt.NDArray[Any]]] = []
    left = limits.max_decoded_bytes
    while not (message := job.receive()).get("end"):
        array = _array(job, message, left)
        left -= array.nbytes + 1
        found.append((str(message.get("name", "")), array))
        if len(found) > _MAX_ARRAYS:
            raise MediaTooLargeError(f"expected at most {_MAX_ARRAYS} arrays, found more")
    job.is_over = True
    return found


def _array(job: Job, message: dict[str, Any], most_bytes: int) -> npt.NDArray[Any]:
    """The array that follows a message."""
    try:
        shape, dtype = tuple(int(length) for length in message["shape"]), np.dtype(str(message["dtype"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DecoderLostError("an array without dtype and shape") from error
    if dtype.hasobject or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise DecoderLostError(f"an array {dtype}{shape}")
    if math.prod(shape) * dtype.itemsize > most_bytes:
        raise MediaTooLargeError(
            f"expected at most {most_bytes:,} bytes of arrays, found {dtype}{list(shape)}"
        )
    array = np.empty(shape, dtype)
    job.read_into(array.reshape(-1).view(np.uint8).data)
    return array


def _info(message: dict[str, Any]) -> VideoInfo:
    try:
        return VideoInfo(
            frames=int(message["frames"]),
            fps=float(message["fps"]),
            seconds=float(message["seconds"]),
            width=int(message["width"]),
            height=int(message["height"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DecoderLostError("a video without a size") from error


@contextmanager
def _named(medium: Media) -> Iterator[None]:
    """Note in an error which medium it is about."""
    try:
        yield
    except MediaError as error:
        error.digest = medium.digest
        raise
