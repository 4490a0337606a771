"""Decoding of images with pillow: one image, or the frames of an animation, to RGB arrays."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from models.media.detection import HEAD_BYTES, format_of
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError

_SIXTEEN_BITS: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})

Image.MAX_IMAGE_PIXELS = None  # the limit is the deployment's, checked by `open_image`


def decode_image(file: BinaryIO, limits: MediaLimits) -> npt.NDArray[np.uint8]:
    """Decode an image, or the first frame of an animation, to (H, W, 3) uint8, rotated as its EXIF data say.

    Raises:
        MediaError: the file is damaged, of another kind, or beyond a limit.
    """
    with reported(), open_image(file, limits) as image:
        image.load()
        return as_rgb(image)


def open_image(file: BinaryIO, limits: MediaLimits) -> Image.Image:
    """Open an image and check its size; no pixel is decoded.

    Raises:
        MediaError: the file is no image, or has too many pixels.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    found = format_of(head)
    if found is None or not found.pillow:
        raise UnsupportedMediaError(
            f"expected an image (PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF), found "
            f"{found.content_type if found else 'an unknown format'}"
        )
    image = Image.open(file, formats=[found.pillow])
    check_pixels(image.width, image.height, limits)
    return image


def check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    """Check the size of an image or frame.

    Raises:
        MediaTooLargeError: it has too many pixels.
    """
    if width * height > limits.max_pixels:
        raise MediaTooLargeError(
            f"expected at most {limits.max_pixels:,} pixels (media.max_pixels), found {width} x {height}"
        )


def as_rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Convert a decoded image to (H, W, 3) uint8.

    Raises:
        UnsupportedMediaError: its pixels are numbers of 32 bits, or of a colour space without conversion.
    """
    orientation = ImageOps.exif_transpose(image)
    image = image if orientation is None else orientation
    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if image.mode in {"I", "F"}:
        raise UnsupportedMediaError(
            f"expected pixels of 8 or 16 bits, found the mode {image.mode!r} (32 bits)"
        )
    return np.array(image.convert("RGB"))


class Animation:
    """The frames of an animated image, or the single frame of another one, in order.

    Attributes:
        count: the number of frames that the file states.
    """

    def __init__(self, file: BinaryIO, limits: MediaLimits) -> None:
        with reported():
            self._image = open_image(file, limits)
            self._image.load()
            self.count = int(getattr(self._image, "n_frames", 1))
        self.size = self._image.size

    def seconds(self, most: float) -> float:
        """Return the duration of all frames, which are decoded for it; 0 for a single one.

        Frames may last unlike long, and WebP states the duration of a frame once it is decoded.

        Raises:
            MediaTooLargeError: it is above `most`.
        """
        total = 0.0
        if self.count > 1:
            for start, _ in self.frames():
                total = start + self._frame_seconds()
                if total > most:
                    raise MediaTooLargeError(f"expected at most {most:g} s (media.max_seconds), found more")
        return total

    def _frame_seconds(self) -> float:
        return float(self._image.info.get("duration", 0) or 0) / 1000

    def frames(self) -> Iterator[tuple[float, Image.Image]]:
        """The time of each frame in seconds, and the frame; it is valid until the next one."""
        seconds = 0.0
        with reported():
            for index in range(self.count):
                try:
                    self._image.seek(index)
                except EOFError:
                    return
                self._image.load()
                yield seconds, self._image
                seconds += self._frame_seconds()


@contextmanager
def reported() -> Iterator[None]:
    """Turn pillow's exceptions into `MediaError`; a lack of memory is not the file's damage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # palettes with transparency, odd metadata
            yield
    except (MediaError, MemoryError, GeneratorExit):
        raise
    except UnidentifiedImageError as error:
        raise MediaError("expected a complete image, found one that is damaged in its header") from error
    except Exception as error:
        raise MediaError(
            f"expected a complete image, found damage: {type(error).__name__}: {error}"
        ) from error
