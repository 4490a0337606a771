"""PCM in, a file's bytes out, piece by piece.

Every encoder takes 16-bit little-endian samples, the channels interleaved, as chunks on the log have them,
and gives out what is sure to be part of the file by then. Compressed formats are FFmpeg's (PyAV).

A file that is told as it comes cannot say in its head how long it is. MP3, Opus, AAC and bare PCM need not;
of WAV and FLAC there are two encoders: one for a stream, whose head leaves the length open, and one that
gives out nothing before the end, and then a head that is right.
"""

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import av
from av.audio.stream import AudioStream

BYTES_PER_SAMPLE: Final = 2
_OPEN: Final = 0xFFFFFFFF
"""What stands for a length that is not known yet."""
_LAYOUTS: Final = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """What samples mean."""

    sample_rate: int
    channels: int = 1

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Sound":
        """What a chunk of audio says of itself."""
        return cls(sample_rate=int(metadata["sample_rate"]), channels=int(metadata.get("num_channels", 1)))


class Encoder(Protocol):
    """One file in the making."""

    def push(self, pcm: bytes) -> bytes:
        """Take samples; what of the file is sure by them, perhaps nothing yet."""
        ...

    def finish(self) -> bytes:
        """No samples come any more: the rest of the file."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFormat:
    """A kind of file.

    Attributes:
        media_type: as HTTP calls it.
        stream: makes an encoder that gives out what it has.
        whole: makes one whose file knows its length, where that is another.
    """

    media_type: str
    stream: Callable[[Sound], Encoder]
    whole: Callable[[Sound], Encoder] | None = None


class _Bare:
    """Samples as they are."""

    def push(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


class _OpenWav:
    """A WAV file whose head leaves its length open."""

    def __init__(self, sound: Sound) -> None:
        self._head = _wav_head(sound, None)

    def push(self, pcm: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + pcm

    def finish(self) -> bytes:
        return self._head


class _WholeWav:
    """A WAV file, once its length is known."""

    def __init__(self, sound: Sound) -> None:
        self._sound = sound
        self._pieces: list[bytes] = []

    def push(self, pcm: bytes) -> bytes:
        self._pieces.append(pcm)
        return b""

    def finish(self) -> bytes:
        pcm = b"".join(self._pieces)
        return _wav_head(self._sound, len(pcm)) + pcm


def _wav_head(sound: Sound, nbytes: int | None) -> bytes:
    """The 44 bytes before the samples."""
    block = BYTES_PER_SAMPLE * sound.channels
    rest, data = (_OPEN, _OPEN) if nbytes is None else (nbytes + 36, nbytes)
    form = (1, sound.channels, sound.sample_rate, sound.sample_rate * block, block, 8 * BYTES_PER_SAMPLE)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", rest, b"WAVE", b"fmt ", 16, *form, b"data", data)


class _Pipe:
    """What a muxer writes to, that cannot go back."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


class _Disk(io.BytesIO):
    """What a muxer writes to, that can: nothing of it is sure before the end."""

    def take(self) -> bytes:
        return self.getvalue() if self.is_finished else b""

    is_finished = False


class _Compressed:
    """A file of FFmpeg's."""

    def __init__(
        self, sound: Sound, container: str, codec: str, options: Mapping[str, str], *, whole: bool = False
    ) -> None:
        self._sound = sound
        self._sink = _Disk() if whole else _Pipe()
        settings = {"fflags": "+bitexact", "flush_packets": "1", **options}
        self._file = av.open(self._sink, "w", format=container, options=settings)
        stream = self._file.add_stream(codec, rate=sound.sample_rate)
        assert isinstance(stream, AudioStream)
        self._stream, context = stream, stream.codec_context
        self._layout = _LAYOUTS[sound.channels]
        context.layout = self._layout
        context.open()
        self._cutter = av.AudioResampler(
            format=context.format,
            layout=self._layout,
            rate=sound.sample_rate,
            frame_size=context.frame_size or None,
        )
        self._samples = 0

    def push(self, pcm: bytes) -> bytes:
        count = len(pcm) // (BYTES_PER_SAMPLE * self._sound.channels)
        if not count:
            return b""
        frame = av.AudioFrame(format="s16", layout=self._layout, samples=count)
        frame.planes[0].update(pcm)
        frame.sample_rate = self._sound.sample_rate
        frame.pts = self._samples
        self._samples += count
        self._encode(frame)
        return self._sink.take()

    def finish(self) -> bytes:
        if self._samples:
            self._encode(None)
            self._file.mux(self._stream.encode(None))
        self._file.close()
        if isinstance(self._sink, _Disk):
            self._sink.is_finished = True
        return self._sink.take()

    def _encode(self, frame: av.AudioFrame | None) -> None:
        for cut in self._cutter.resample(frame):
            self._file.mux(self._stream.encode(cut))


def _mp3(sound: Sound) -> Encoder:
    return _Compressed(sound, "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"})


def _opus(sound: Sound) -> Encoder:
    # A page for every 100 ms: by itself the container would wait for a second.
    return _Compressed(sound, "ogg", "libopus", {"page_duration": "100000"})


def _aac(sound: Sound) -> Encoder:
    return _Compressed(sound, "adts", "aac", {})


def _open_flac(sound: Sound) -> Encoder:
    return _Compressed(sound, "flac", "flac", {})


def _whole_flac(sound: Sound) -> Encoder:
    return _Compressed(sound, "flac", "flac", {}, whole=True)


FORMATS: Final[Mapping[str, AudioFormat]] = {
    "mp3": AudioFormat(media_type="audio/mpeg", stream=_mp3),
    "opus": AudioFormat(media_type="audio/ogg", stream=_opus),
    "aac": AudioFormat(media_type="audio/aac", stream=_aac),
    "flac": AudioFormat(media_type="audio/flac", stream=_open_flac, whole=_whole_flac),
    "wav": AudioFormat(media_type="audio/wav", stream=_OpenWav, whole=_WholeWav),
    "pcm": AudioFormat(media_type="audio/pcm", stream=lambda _: _Bare()),
}
"""Every kind of file an answer may come in, by the name OpenAI has for it."""
