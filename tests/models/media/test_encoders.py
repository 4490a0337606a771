from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from models.media.encoders import ImageFormat, encode_image, encode_video

RED_TO_BLUE = np.linspace([255, 0, 0], [0, 0, 255], 12).round().astype(np.uint8).reshape(3, 4, 3)


def opened(file: npt.NDArray[np.uint8]) -> Image.Image:
    return Image.open(BytesIO(file.tobytes()))


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_an_image_file_is_of_its_format_and_has_the_pixels(form: ImageFormat) -> None:
    image = opened(encode_image(RED_TO_BLUE, form, quality=100))
    assert (image.format, image.size) == (form.upper(), (4, 3))
    off = np.abs(np.asarray(image.convert("RGB"), np.int16) - RED_TO_BLUE)
    assert off.max() == 0 if form == "png" else off.mean() < 40


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 4)])
def test_grey_and_transparent_images_are_exact_as_png(shape: tuple[int, ...]) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    assert np.array_equal(np.asarray(opened(encode_image(pixels))), pixels.reshape(shape).squeeze())


def test_floats_are_shares_of_full_brightness() -> None:
    pixels = np.array([[[0, 0.5, 1], [-1, 2, np.nan]]], np.float32)
    assert np.asarray(opened(encode_image(pixels))).tolist() == [[[0, 128, 255], [0, 255, 0]]]


@pytest.mark.parametrize(
    ("pixels", "form", "message"),
    [
        (np.zeros((3, 4, 2), np.uint8), "png", "found .3, 4, 2."),
        (np.zeros((3, 4, 3), np.int32), "png", "found int32"),
        (np.zeros((3, 4, 4), np.uint8), "jpeg", "without transparency"),
        (np.zeros((3, 4, 3), np.uint8), "gif", "found 'gif'"),
    ],
)
def test_what_is_no_image_is_refused_by_name(pixels: npt.NDArray[Any], form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_image(pixels, form)


@pytest.mark.parametrize(("height", "width"), [(32, 48), (33, 47)])
def test_a_video_has_its_frames_in_order_and_its_speed(height: int, width: int) -> None:
    levels = np.linspace(0, 1, 6)
    frames = np.broadcast_to(levels[:, None, None, None], (6, height, width, 3))
    file = encode_video(frames, fps=12)
    with av.open(BytesIO(file.tobytes()), "r") as video:
        stream = video.streams.video[0]
        assert (stream.average_rate, stream.codec_context.name) == (Fraction(12), "h264")
        found = [frame.to_ndarray(format="rgb24") for frame in video.decode(stream)]
    assert len(found) == 6
    assert found[0].shape == (height + height % 2, width + width % 2, 3)
    assert np.abs([frame.mean() for frame in found] - levels * 255).max() < 8


@pytest.mark.parametrize(
    ("shape", "fps", "message"),
    [
        ((0, 8, 8, 3), 1, "found .0, 8, 8, 3."),
        ((2, 8, 8), 1, "found .2, 8, 8."),
        ((2, 8, 8, 3), 0, "found 0"),
    ],
)
def test_what_is_no_video_is_refused_by_name(shape: tuple[int, ...], fps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_video(np.zeros(shape, np.uint8), fps)
