"""Audio encoders: PCM in, a file's bytes out, piece by piece.

Every encoder takes 16-bit little-endian samples with interleaved channels, as the log's chunks have them, and
returns the bytes of the file that are final by then. FFmpeg (PyAV) encodes the compressed formats.

A streamed file cannot have its length in the header. MP3, Opus, AAC and raw PCM need none. WAV and FLAC have
two encoders: one for streams, whose header leaves the length open, and one that returns nothing before the
end, and then a correct header.
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
"""The length of a WAV file that is not known yet."""
_LAYOUTS: Final = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PcmFormat:
    """The sample rate and the channels of PCM samples."""

    sample_rate: int
    channels: int = 1

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "PcmFormat":
        """The format in a chunk's metadata."""
        return cls(sample_rate=int(metadata["sample_rate"]), channels=int(metadata.get("num_channels", 1)))


class Encoder(Protocol):
    """The encoder of one file."""

    def push(self, pcm: bytes) -> bytes:
        """Add samples; return the bytes that are final, perhaps none."""
        ...

    def finish(self) -> bytes:
        """End the file; return the rest of its bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFormat:
    """A file format.

    Attributes:
        media_type: its MIME type.
        stream: makes an encoder that returns bytes as early as it can.
        whole: makes an encoder with the length in the header, if that is another one.
    """

    media_type: str
    stream: Callable[[PcmFormat], Encoder]
    whole: Callable[[PcmFormat], Encoder] | None = None


class _RawPcm:
    """Samples without a header."""

    def push(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


class _OpenWav:
    """A WAV file whose header leaves its length open."""

    def __init__(self, pcm: PcmFormat) -> None:
        self._head = _wav_head(pcm, None)

    def push(self, pcm: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + pcm

    def finish(self) -> bytes:
        return self._head


class _WholeWav:
    """A WAV file with its length in the header."""

    def __init__(self, pcm: PcmFormat) -> None:
        self._pcm = pcm
        self._pieces: list[bytes] = []

    def push(self, pcm: bytes) -> bytes:
        self._pieces.append(pcm)
        return b""

    def finish(self) -> bytes:
        pcm = b"".join(self._pieces)
        return _wav_head(self._pcm, len(pcm)) + pcm


def _wav_head(pcm: PcmFormat, nbytes: int | None) -> bytes:
    """The header of 44 bytes; `nbytes` is None if the length is not known."""
    block = BYTES_PER_SAMPLE * pcm.channels
    rest, data = (_OPEN, _OPEN) if nbytes is None else (nbytes + 36, nbytes)
    form = (1, pcm.channels, pcm.sample_rate, pcm.sample_rate * block, block, 8 * BYTES_PER_SAMPLE)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", rest, b"WAVE", b"fmt ", 16, *form, b"data", data)


class _StreamSink:
    """A muxer's output that cannot seek: its bytes are final at once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


class _SeekableSink(io.BytesIO):
    """A muxer's output that can seek: its bytes are final at the end."""

    def take(self) -> bytes:
        return self.getvalue() if self.is_finished else b""

    is_finished = False


class _Compressed:
    """A file encoded by FFmpeg."""

    def __init__(
        self, pcm: PcmFormat, container: str, codec: str, options: Mapping[str, str], *, whole: bool = False
    ) -> None:
        self._pcm = pcm
        self._sink = _SeekableSink() if whole else _StreamSink()
        settings = {"fflags": "+bitexact", "flush_packets": "1", **options}
        self._file = av.open(self._sink, "w", format=container, options=settings)
        stream = self._file.add_stream(codec, rate=pcm.sample_rate)
        assert isinstance(stream, AudioStream)
        self._stream, context = stream, stream.codec_context
        self._layout = _LAYOUTS[pcm.channels]
        context.layout = self._layout
        context.open()
        self._cutter = av.AudioResampler(
            format=context.format,
            layout=self._layout,
            rate=pcm.sample_rate,
            frame_size=context.frame_size or None,
        )
        self._samples = 0

    def push(self, pcm: bytes) -> bytes:
        count = len(pcm) // (BYTES_PER_SAMPLE * self._pcm.channels)
        if not count:
            return b""
        frame = av.AudioFrame(format="s16", layout=self._layout, samples=count)
        frame.planes[0].update(pcm)
        frame.sample_rate = self._pcm.sample_rate
        frame.pts = self._samples
        self._samples += count
        self._encode(frame)
        return self._sink.take()

    def finish(self) -> bytes:
        if self._samples:
            self._encode(None)
            self._file.mux(self._stream.encode(None))
        self._file.close()
        if isinstance(self._sink, _SeekableSink):
            self._sink.is_finished = True
        return self._sink.take()

    def _encode(self, frame: av.AudioFrame | None) -> None:
        for cut in self._cutter.resample(frame):
            self._file.mux(self._stream.encode(cut))


def _mp3(pcm: PcmFormat) -> Encoder:
    return _Compressed(pcm, "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"})


def _opus(pcm: PcmFormat) -> Encoder:
    # A page every 100 ms: the container's default is a second.
    return _Compressed(pcm, "ogg", "libopus", {"page_duration": "100000"})


def _aac(pcm: PcmFormat) -> Encoder:
    return _Compressed(pcm, "adts", "aac", {})


def _open_flac(pcm: PcmFormat) -> Encoder:
    return _Compressed(pcm, "flac", "flac", {})


def _whole_flac(pcm: PcmFormat) -> Encoder:
    return _Compressed(pcm, "flac", "flac", {}, whole=True)


FORMATS: Final[Mapping[str, AudioFormat]] = {
    "mp3": AudioFormat(media_type="audio/mpeg", stream=_mp3),
    "opus": AudioFormat(media_type="audio/ogg", stream=_opus),
    "aac": AudioFormat(media_type="audio/aac", stream=_aac),
    "flac": AudioFormat(media_type="audio/flac", stream=_open_flac, whole=_whole_flac),
    "wav": AudioFormat(media_type="audio/wav", stream=_OpenWav, whole=_WholeWav),
    "pcm": AudioFormat(media_type="audio/pcm", stream=lambda _: _RawPcm()),
}
"""The file formats of an answer, by OpenAI's names."""
