"""Audio of every container becomes one channel at the asked rate."""

import io
import struct

import numpy as np
import pytest

from models.media.audio import audio_blocks, decode_audio
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError
from tests.models.media import samples

LIMITS = MediaLimits()


@pytest.mark.parametrize("container", samples.AUDIO)
def test_a_sine_keeps_its_frequency_and_length(container: str) -> None:
    found = decode_audio(io.BytesIO(samples.audio(container)), 16_000, LIMITS)

    assert found.dtype == np.float32
    assert len(found) == pytest.approx(8_000, abs=500)  # AAC has no exact end
    assert np.abs(np.fft.rfft(found)).argmax() * 16_000 / len(found) == pytest.approx(440, abs=3)
    assert np.sqrt((found[1000:-1000] ** 2).mean()) == pytest.approx(
        16_000 / 32_768 * 0.7071 * 1.4142, rel=0.05
    )


def test_audio_that_is_too_long_is_refused() -> None:
    with pytest.raises(MediaTooLargeError, match="max_seconds"):
        decode_audio(io.BytesIO(samples.audio("wav")), 16_000, MediaLimits(max_seconds=0.1))


def floats(*samples: float) -> bytes:
    """A WAV file of 32-bit floats: FFmpeg reads them as they are."""
    data = np.array(samples, "<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32)
    head = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    return head + form + struct.pack("<4sI", b"data", len(data)) + data


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_are_no_sound_are_refused(value: float) -> None:
    with pytest.raises(MediaError, match="samples from -1 to 1, found one of size"):
        decode_audio(io.BytesIO(floats(0.0, value, 0.5)), 16_000, LIMITS)


def test_audio_of_floats_may_be_louder_than_whole_numbers_can_be() -> None:
    assert decode_audio(io.BytesIO(floats(0.0, -1.5, 0.5)), 16_000, LIMITS).tolist() == [0.0, -1.5, 0.5]


def test_audio_without_a_sample_is_refused() -> None:
    with pytest.raises(MediaError, match="expected audio with samples"):
        [*audio_blocks(io.BytesIO(floats()), 16_000, LIMITS)]


def test_an_image_is_no_audio() -> None:
    with pytest.raises(UnsupportedMediaError, match="image/png"):
        decode_audio(io.BytesIO(samples.image("PNG")), 16_000, LIMITS)


def test_a_video_without_sound_is_refused() -> None:
    with pytest.raises(UnsupportedMediaError, match="without an audio stream"):
        decode_audio(io.BytesIO(samples.video("mp4")), 16_000, LIMITS)


@pytest.mark.parametrize("container", samples.AUDIO)
def test_truncated_audio_is_shorter_or_refused(container: str) -> None:
    data = samples.audio(container)

    try:
        found = decode_audio(io.BytesIO(data[: len(data) // 2]), 16_000, LIMITS)
    except MediaError:
        return
    assert len(found) < 7_000
