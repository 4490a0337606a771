"""Images of requests for BAGEL's two encoders, in the sizes of the published code.

An image is first resized as for the VAE, and from there for the ViT. Its size after the first of them is that
of the edited image. The published limits are used by all checkpoints.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.bagel.options import MAX_SIDE, SIDE_STEP, BagelOptions

MAX_PIXELS: Final = 14 * 14 * 9 * 1024
"""The most pixels of a resized image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLimits:
    """The sizes that an encoder takes, in pixels.

    Attributes:
        longest: the largest longer side.
        shortest: the least shorter side, unless the longer one would be too large.
        stride: each side is a multiple of it.
    """

    longest: int
    shortest: int
    stride: int

    def of(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of a resized image."""
        scale = min(self.longest / max(width, height), 1.0)
        scale = max(scale, self.shortest / min(width, height))
        size = self._scaled(width, height, scale)
        if size[0] * size[1] > MAX_PIXELS:
            size = self._scaled(*size, MAX_PIXELS / (size[0] * size[1]))
        if max(size) > self.longest:
            size = self._scaled(*size, self.longest / max(size))
        return size

    def _scaled(self, width: int, height: int, scale: float) -> tuple[int, int]:
        def side(length: int) -> int:
            return max(self.stride, round(round(length * scale) / self.stride) * self.stride)

        return side(width), side(height)


VAE: Final = SideLimits(longest=MAX_SIDE, shortest=512, stride=SIDE_STEP)
VIT: Final = SideLimits(longest=980, shortest=224, stride=14)


def resized(image: Any, options: BagelOptions, *, largest: int = MAX_SIDE) -> Any:
    """A pillow image in the size in which it is edited.

    Args:
        image: in RGB.
        options: with a width or a height, the image is scaled to fit these; otherwise as published.
        largest: the longest side that the checkpoint has positions for.
    """
    if options.width is None and options.height is None:
        return _resize(image, VAE.of(*image.size), largest)
    wanted = zip((options.width, options.height), image.size, strict=True)
    scale = min(limit / side for limit, side in wanted if limit is not None)
    return _resize(image, (round(image.width * scale), round(image.height * scale)), largest)


def pixels_of(image: Any) -> npt.NDArray[np.float32]:
    """A pillow image as (3, height, width) float32 from -1 to 1."""
    cells = np.asarray(image, np.float32) / np.float32(255)
    return np.ascontiguousarray(((cells - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1))


def vit_image(image: Any) -> Any:
    """A resized pillow image in the size for the ViT."""
    return _scaled_to(image, VIT.of(*image.size))


def _resize(image: Any, size: tuple[int, int], largest: int) -> Any:
    scale = min(1.0, largest / max(size))
    width, height = (max(SIDE_STEP, int(side * scale) // SIDE_STEP * SIDE_STEP) for side in size)
    return _scaled_to(image, (width, height))


def _scaled_to(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image  # noqa: PLC0415 - only for media

    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
