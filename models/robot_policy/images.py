"""A camera's image in the size of the model: resized to fit, with black borders, from -1 to 1. No torch."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from models.robot_policy.normalization import Floats
from shared.errors import ClientError

_MAX_SIDE: Final = 16_384


def pixels_of(image: npt.NDArray[np.uint8], size: int) -> Floats:
    """The pixels of an image (H, W, 3), as openpi's server makes them: (3, size, size) float32."""
    height, width = image.shape[:2]
    if (height, width) != (size, size):
        ratio = max(width / size, height / size)
        new_height, new_width = int(height / ratio), int(width / ratio)
        if not (new_height and new_width):
            raise ClientError(
                f"an image of {width} x {height} pixels has no pixel left at {size} x {size}: expected an "
                "image of another shape",
                code="invalid_image",
            )
        resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
        framed = Image.new("RGB", (size, size))
        framed.paste(resized, ((size - new_width) // 2, (size - new_height) // 2))
        image = np.asarray(framed)
    scaled = image.astype(np.float32) / np.float32(255.0) * np.float32(2.0) - np.float32(1.0)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def image_of(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The image in an array of a robot: (H, W, 3) or (3, H, W), uint8 or floats from 0 to 1.

    Raises:
        ClientError: it is something else.
    """
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    fits = array.ndim == 3 and array.shape[2] == 3 and 0 < min(array.shape) <= max(array.shape) <= _MAX_SIDE
    if not fits or array.dtype.kind not in "uf" or (array.dtype.kind == "u" and array.dtype != np.uint8):
        raise ClientError(
            f"{name}: expected an image, (H, W, 3) or (3, H, W) of uint8 or of floats from 0 to 1, found "
            f"{array.dtype} {array.shape}",
            code="invalid_image",
        )
    if array.dtype.kind == "f":
        array = (np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(array)
