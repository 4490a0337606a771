"""A part of a file's audio is a slice of the whole, in every format; files that were cut off are refused."""

import io
from functools import cache
from typing import Any

import av
import numpy as np
import pytest

from models.media.audio import decode_audio
from models.media.audio_spans import audio_span
from models.media.kinds import MediaError, MediaLimits
from models.media.waveforms import Samples

RATE, SECONDS = 16_000, 9
LIMITS = MediaLimits()
FORMATS = [
    ("wav", "pcm_s16le", 16_000, "mono"),
    ("wav", "pcm_s16le", 44_100, "stereo"),
    ("flac", "flac", 48_000, "stereo"),
    ("mp3", "libmp3lame", 44_100, "stereo"),
    ("ogg", "libopus", 48_000, "mono"),
    ("mp4", "aac", 44_100, "stereo"),
    ("adts", "aac", 44_100, "mono"),
]


@cache
def file(form: str, codec: str, rate: int, layout: str) -> bytes:
    time = np.arange(rate * SECONDS) / rate
    noise = 0.1 * np.random.default_rng(0).standard_normal(len(time))
    sound = (0.4 * np.sin(2 * np.pi * (200 + 20 * time) * time) + noise).astype(np.float32)
    target = io.BytesIO()
    with av.open(target, "w", format=form) as out:
        stream: Any = out.add_stream(codec, rate=rate)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray(
            np.tile(sound, (1 + (layout == "stereo"), 1)), format="fltp", layout=layout
        )
        frame.sample_rate = rate
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return target.getvalue()


@cache
def whole(*form: Any) -> Samples:
    return decode_audio(io.BytesIO(file(*form)), RATE, LIMITS)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form[0]}-{form[2]}")
@pytest.mark.parametrize(
    ("first", "count"), [(0, 32_000), (70, 100), (63_801, 32_000), (8 * RATE, 10 * RATE), (20 * RATE, 9)]
)
def test_a_span_is_a_slice_of_the_whole(form: tuple[str, str, int, str], first: int, count: int) -> None:
    expected = whole(*form)[first : first + count]
    found = audio_span(io.BytesIO(file(*form)), RATE, first, count, LIMITS)
    assert len(found) == pytest.approx(len(expected), abs=600)  # AAC has no exact end
    common = min(len(found), len(expected))
    # A part of what AAC decodes to is random noise, in bands whose details the encoder has dropped.
    difference = found[:common] - expected[:common]
    if form[1] == "aac":
        assert np.sqrt((difference**2).mean()) < 0.05 if common else True
    else:
        np.testing.assert_allclose(difference, 0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [form for form in FORMATS if form[0] != "ogg"], ids=lambda form: form[0])
def test_a_file_that_was_cut_off_is_refused(form: tuple[str, str, int, str]) -> None:
    data = file(*form)
    with pytest.raises(MediaError, match="complete file"):
        decode_audio(io.BytesIO(data[: len(data) * 6 // 10]), RATE, LIMITS)


def test_a_wav_file_of_unknown_size_is_complete() -> None:
    data = file(*FORMATS[0])
    place = data.index(b"data") + 4
    streamed = data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]
    assert len(decode_audio(io.BytesIO(streamed), RATE, LIMITS)) == SECONDS * RATE
