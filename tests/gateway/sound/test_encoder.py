import io
import math
import struct
import subprocess
import sys
import wave

import av
import pytest

from gateway.sound.encoder import FORMATS, AudioFormat, Encoder, PcmFormat

SOUND = PcmFormat(sample_rate=24_000)
SECOND = b"".join(struct.pack("<h", int(12_000 * math.sin(i * 0.05))) for i in range(24_000))


def fed(encoder: Encoder, pcm: bytes, size: int) -> list[bytes]:
    pieces = [encoder.push(pcm[at : at + size]) for at in range(0, len(pcm), size)]
    return [*pieces, encoder.finish()]


def decoded(data: bytes) -> tuple[float, int]:
    """The duration of a file's audio in seconds, and its sample rate."""
    with av.open(io.BytesIO(data), "r") as file:
        [stream] = file.streams.audio
        samples = sum(frame.samples for frame in file.decode(stream))
        return samples / stream.rate, stream.rate


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"pcm"}))
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_file_sounds_as_long_as_what_went_in(name: str, is_stream: bool) -> None:
    kind: AudioFormat = FORMATS[name]
    make = kind.stream if is_stream else kind.whole or kind.stream
    seconds, rate = decoded(b"".join(fed(make(SOUND), SECOND, 4096)))
    assert rate == (48_000 if name == "opus" else 24_000)  # Opus always plays at 48 kHz
    assert seconds == pytest.approx(1.0, abs=0.08)  # whole frames, and the encoder's own delay


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_without_loss_the_samples_are_the_same(name: str) -> None:
    for make in (FORMATS[name].stream, FORMATS[name].whole):
        assert make is not None
        data = b"".join(fed(make(SOUND), SECOND, 1000))
        with av.open(io.BytesIO(data), "r") as file:
            heard = b"".join(bytes(frame.planes[0])[: frame.samples * 2] for frame in file.decode(audio=0))
        assert heard == SECOND


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_stream_is_told_long_before_its_end(name: str) -> None:
    pieces = fed(FORMATS[name].stream(SOUND), SECOND, 4096)
    told = sum(map(len, pieces[: len(pieces) // 2]))
    assert told > sum(map(len, pieces)) / 4


def test_a_whole_wav_says_its_length() -> None:
    make = FORMATS["wav"].whole
    assert make is not None
    *before, last = fed(make(SOUND), SECOND, 4096)
    assert set(before) == {b""}
    with wave.open(io.BytesIO(last)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (
            24_000,
            24_000,
            1,
            2,
        )


def test_a_streamed_wav_leaves_its_length_open() -> None:
    first, *_ = fed(FORMATS["wav"].stream(SOUND), SECOND, 4096)
    assert first[:8] == b"RIFF\xff\xff\xff\xff"
    assert first[40:44] == b"\xff\xff\xff\xff"
    assert first[44:] == SECOND[:4096]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_sound_at_all_is_no_error(name: str) -> None:
    data = FORMATS[name].stream(SOUND).finish()
    assert len(data) == (44 if name == "wav" else 0) or data.startswith((b"fLaC", b"OggS"))


def test_stereo_is_two_channels() -> None:
    make = FORMATS["flac"].whole
    assert make is not None
    data = b"".join(fed(make(PcmFormat(sample_rate=24_000, channels=2)), SECOND, 4096))
    assert decoded(data)[0] == pytest.approx(0.5, abs=0.01)


@pytest.mark.processes
def test_a_gateway_needs_no_numpy_for_it() -> None:
    """PyAV imports numpy only for arrays, which the import contract forbids here."""
    pushed = "[kind.stream(sound).push(bytes(9000)) for kind in encoder.FORMATS.values()]"
    code = f"""
import sys
from gateway.sound import encoder
sound = encoder.PcmFormat(sample_rate=24000)
{pushed}
sys.exit('numpy' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
