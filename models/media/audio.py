"""Decoding of audio with PyAV: any of the listed codecs to one channel of float32, resampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import av
import numpy as np
from av.audio.resampler import AudioResampler

from models.media.complete_sound import check_complete
from models.media.containers import av_reported, check_codec, open_container
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError
from models.media.waveforms import Samples, check_rate, check_samples, join

CODECS: Final = frozenset(
    {"aac", "mp3", "mp3float", "mp2", "mp2float", "flac", "opus", "libopus", "vorbis", "libvorbis", "alac"}
    | {f"pcm_{kind}" for kind in ("u8", "s8", "s16le", "s16be", "s24le", "s24be", "s32le", "s32be")}
    | {f"pcm_{kind}" for kind in ("f32le", "f32be", "f64le", "f64be", "alaw", "mulaw")}
)
"""The audio codecs that are decoded."""


def decode_audio(file: BinaryIO, rate: int, limits: MediaLimits) -> Samples:
    """Decode a file's audio to (N,) float32 from -1 to 1: one channel, `rate` samples per second.

    Raises:
        MediaError: the file is damaged, has no audio, or is beyond a limit.
    """
    return join([*audio_blocks(file, rate, limits)])


def audio_blocks(file: BinaryIO, rate: int, limits: MediaLimits) -> Iterator[Samples]:
    """Decode a file's audio block by block, see `decode_audio`."""
    count = 0
    with open_sound(file, rate, limits) as (container, stream):
        for block in _joined(_resampled(container, stream, rate), rate):
            count += len(block)
            check_samples(block)
            _check_seconds(count / rate, limits)
            yield block
        stated_s = _stated_seconds(container, stream)
        check_complete(file, container, stream, stated_s=stated_s, seconds=count / rate)
    if not count:
        raise MediaError("expected audio with samples, found none")


@contextmanager
def open_sound(file: BinaryIO, rate: int, limits: MediaLimits) -> Iterator[tuple[Any, Any]]:
    """Open a file with audio, to be resampled to `rate`: its container, and the stream.

    Raises:
        MediaError: the file is damaged, has no audio, or states a length beyond the limit.
    """
    check_rate(rate)
    with open_container(file, "audio (WAV, FLAC, MP3, AAC, OGG, M4A) or a video with audio") as container:
        if not container.streams.audio:
            raise UnsupportedMediaError("expected audio, found a file without an audio stream")
        stream = container.streams.audio[0]
        check_codec(stream, CODECS)
        stream.codec_context.thread_count = 1
        _check_seconds(_stated_seconds(container, stream), limits)
        yield container, stream


def _resampled(container: Any, stream: Any, rate: int) -> Iterator[Samples]:
    resampler = AudioResampler(format="flt", layout="mono", rate=rate)
    with av_reported():
        for frame in container.decode(stream):
            frame.pts = None  # gaps and jumps of time stamps are no reason to insert or drop samples
            yield from _samples(resampler.resample(frame))
        yield from _samples(resampler.resample(None))


def _samples(frames: Any) -> Iterator[Samples]:
    for frame in frames:
        block = frame.to_ndarray().reshape(-1).astype(np.float32)
        if len(block):
            yield block


def _joined(blocks: Iterator[Samples], most: int) -> Iterator[Samples]:
    """The same samples in fewer blocks, of about `most` samples each: codecs have frames of a thousand."""
    waiting: list[Samples] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= most:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def _stated_seconds(container: Any, stream: Any) -> float:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return float(container.duration / av.time_base) if container.duration is not None else 0.0


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.max_seconds:
        raise MediaTooLargeError(
            f"expected at most {limits.max_seconds:g} s (media.max_seconds), found {seconds:.0f} s or more"
        )
