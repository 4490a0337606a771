"""The size of a video's frames by a number of pixels for all of them together, as Qwen3-VL was trained."""

import math
from typing import Final

MAX_RATIO: Final = 200
FRAMES_OF_A_PLANE: Final = 2


def size_within_volume(
    frames: int, height: int, width: int, *, cell: int, pixels: tuple[int, int]
) -> tuple[int, int]:
    """Height and width of resized frames, multiples of `cell`.

    Args:
        frames: the number of frames.
        height: of a frame, in pixels.
        width: of a frame, in pixels.
        cell: the side of a cell in pixels.
        pixels: the fewest and the most pixels of all frames together.

    Raises:
        ValueError: a frame is too long or too narrow.
    """
    if min(height, width) < cell:
        scale = max(cell / height, cell / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise ValueError(f"one side is more than {MAX_RATIO} times the other")
    fewest, most = pixels
    rounded = (round(height / cell) * cell, round(width / cell) * cell)
    planes = round(frames / FRAMES_OF_A_PLANE) * FRAMES_OF_A_PLANE
    volume = planes * rounded[0] * rounded[1]
    if volume > most:
        scale = math.sqrt(frames * height * width / most)
        return (
            max(cell, math.floor(height / scale / cell) * cell),
            max(cell, math.floor(width / scale / cell) * cell),
        )
    if volume < fewest:
        scale = math.sqrt(fewest / (frames * height * width))
        return math.ceil(height * scale / cell) * cell, math.ceil(width * scale / cell) * cell
    return rounded
