from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dalsegno.client.media import Audio, files_of
from shared.errors import ClientError

PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
TONE = Audio(b"\x01\x00\x02\x00", 8_000)


@pytest.mark.parametrize("item", [PIXELS, Image.fromarray(PIXELS)], ids=["numpy", "pillow"])
def test_pixels_become_a_png_file(item: Any) -> None:
    [file] = files_of("image", item)

    assert (file.modality, file.name) == ("image", "image-0.png")
    assert (np.asarray(Image.open(BytesIO(file.data))) == PIXELS).all()


def test_sound_becomes_a_wav_file_and_comes_back_from_it(tmp_path: Path) -> None:
    [file] = files_of("audio", TONE)
    (tmp_path / file.name).write_bytes(file.data)

    assert file.name == "audio-0.wav"
    assert Audio.read(tmp_path / file.name) == TONE


@pytest.mark.parametrize(
    ("data", "modality", "extension"),
    [
        (b"\x89PNG\r\n\x1a\n", "image", "png"),
        (b"\xff\xd8\xff\xe0", "image", "jpg"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image", "webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio", "wav"),
        (b"ID3\x04", "audio", "mp3"),
        (b"fLaC", "audio", "flac"),
        (b"\x00\x00\x00\x20ftypisom", "video", "mp4"),
        (b"\x00\x00\x00\x20ftypM4A ", "audio", "m4a"),
        (b"\x1aE\xdf\xa3", "video", "webm"),
    ],
)
def test_bytes_are_named_by_how_they_begin(data: bytes, modality: str, extension: str) -> None:
    [file] = files_of(modality, data)

    assert file.name == f"{modality}-0.{extension}"


@pytest.mark.parametrize(
    ("modality", "item", "hint"),
    [
        ("image", b"what", "do not begin like a known image format"),
        ("image", ("song.mp3", b"x"), "lacks an extension of image files"),
        ("audio", np.zeros(3), r"Audio.of\(samples, sample_rate\)"),
        ("image", 7, "found int"),
        ("image", "/nowhere/cat.png", "cat.png cannot be read"),
    ],
)
def test_what_is_no_medium_is_refused(modality: str, item: Any, hint: str) -> None:
    with pytest.raises(ClientError, match=hint):
        files_of(modality, item)


def test_nothing_is_no_file() -> None:
    assert files_of("image", None) == files_of("image", []) == []


def test_sound_goes_to_numpy_and_back() -> None:
    stereo = np.array([[1, -1], [2, -2]], dtype=np.int16)

    sound = Audio.of(stereo, 8_000)

    assert (sound.channels, sound.seconds) == (2, 2 / 8_000)
    assert (sound.numpy() == stereo).all()
    assert Audio.of(np.array([1.0, -2.0, 0.5]), 8_000).numpy().tolist() == [32767, -32767, 16384]


@pytest.mark.parametrize("samples", [np.zeros((1, 1, 1)), np.zeros(3, dtype=np.int64)])
def test_samples_of_another_shape_or_type_are_refused(samples: Any) -> None:
    with pytest.raises(ClientError, match="expected sound as"):
        Audio.of(samples, 8_000)


def test_a_file_that_is_no_wav_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "song.wav"
    path.write_bytes(b"ID3")

    with pytest.raises(ClientError, match=r"song.wav: expected a WAV file"):
        Audio.read(path)
