"""The facts of videos, read from their headers."""

import io

import av
import numpy as np
import pytest

from models.media.encoders import Sound, encode_video
from models.media.video_facts import video_facts

FRAMES = np.zeros((5, 32, 48, 3), np.uint8)


def test_a_video_says_its_codec_size_length_and_speed() -> None:
    known = {"codec": "h264", "width": 48, "height": 32, "frames": 5}
    assert video_facts(encode_video(FRAMES, 24).tobytes()) == known | {"fps": 24}
    assert video_facts(encode_video(FRAMES, 12.5).tobytes()) == known | {"fps": 12.5}


@pytest.mark.parametrize(("rate", "found"), [(200, 7350), (8000, 8000), (44_100, 44_100), (192_000, 96_000)])
def test_a_sound_has_a_rate_that_aac_has(rate: int, found: int) -> None:
    seconds = np.arange(rate) / rate
    sound = Sound(np.sin(2 * np.pi * 50 * seconds, dtype=np.float32)[None], rate)
    with av.open(io.BytesIO(encode_video(FRAMES, 4, sound=sound).tobytes()), "r") as file:
        [track] = file.streams.audio
        heard = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
        assert track.rate == found
    assert abs(heard.shape[1] / found - 1) < 0.5
    assert np.abs(heard).max() > 0.3


def test_a_video_with_sound_names_its_codec() -> None:
    for channels in (1, 2):
        sound = Sound(np.zeros((channels, 3200), np.float32), 16_000)
        assert video_facts(encode_video(FRAMES, 24, sound=sound).tobytes())["audio_codec"] == "aac"


def test_bytes_that_are_no_video_have_no_facts() -> None:
    assert video_facts(b"\0\0\0\x20ftypisom") == {}
