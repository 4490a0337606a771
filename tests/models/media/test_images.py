"""Images are decoded as pillow decodes them, or refused by name."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.media.images import decode_image
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError
from tests.models.media import samples

LIMITS = MediaLimits(max_pixels=1_000_000)


def decoded(data: bytes) -> "np.ndarray[Any, Any]":
    return decode_image(io.BytesIO(data), LIMITS)


@pytest.mark.parametrize("kind", samples.IMAGES)
def test_every_format_is_decoded_as_pillow_decodes_it(kind: str) -> None:
    data = samples.image(kind)

    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert np.array_equal(decoded(data), expected)
    assert np.abs(expected.astype(int) - samples.picture()).max() <= 16  # GIF has 256 colours


@pytest.mark.parametrize(
    ("orientation", "turns", "mirror"), [(1, 0, False), (3, 2, False), (6, 3, False), (2, 0, True)]
)
def test_an_image_is_rotated_as_its_exif_data_say(orientation: int, turns: int, *, mirror: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = np.rot90(samples.picture(), turns)

    found = decoded(samples.image("PNG", exif=exif))

    assert np.array_equal(found, expected[:, ::-1] if mirror else expected)


def test_transparency_is_dropped_and_grey_becomes_colour() -> None:
    rgb = samples.picture()
    clear = np.dstack([rgb, np.zeros(rgb.shape[:2], np.uint8)])

    assert np.array_equal(decoded(samples.image("PNG", clear)), rgb)
    assert decoded(samples.image("PNG", rgb[..., 0])).shape == rgb.shape


def test_sixteen_bits_are_reduced_to_eight() -> None:
    deep = (np.arange(32 * 48, dtype=np.uint16) * 42).reshape(32, 48)

    assert np.array_equal(decoded(samples.image("PNG", deep))[..., 1], deep >> 8)


def test_the_first_frame_of_an_animation_is_decoded() -> None:
    assert np.abs(decoded(samples.animation("WEBP")).astype(int) - samples.picture()).max() < 40


def test_an_image_of_32_bits_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMediaError, match="'F'"):
        decoded(samples.image("TIFF", np.ones((4, 4), np.float32)))


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(MediaTooLargeError, match="50000 x 50000"):
        decoded(samples.png_header(50_000, 50_000))


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"hello", samples.video("mp4"), samples.audio("wav")])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match="expected"):
        decoded(data)


@pytest.mark.parametrize("kind", samples.IMAGES)
def test_a_truncated_image_is_refused(kind: str) -> None:
    data = samples.image(kind)

    with pytest.raises(MediaError, match=r"complete image|32 bits"):
        decoded(data[: len(data) // 2])
