"""The CPU node of Qwen2.5-VL: images and videos as grids; a video's tokens follow one another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from models.base import MediaReader
from models.media.kinds import VideoInfo
from models.vision_language.grids import VIDEO, Clip, GridAdapter, VideoSettings
from models.vision_language.processing import VisionLanguageProcessing, read_processing

SIZE: Final = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""The pixels of a frame where the checkpoint does not say."""
FRAMES_OF_A_PLANE: Final = 2


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    adapter = GridAdapter(checkpoint, media, Qwen2VideoRules(), size=SIZE, max_tokens=max_seq_len)
    return read_processing(checkpoint, adapter, max_seq_len=max_seq_len)


class Qwen2VideoRules:
    """Frames at equal distances, each with a number of pixels of its own.

    Args:
        token: the text of a row's token.
    """

    def __init__(self, token: str = VIDEO) -> None:
        self._token: Final = token

    def choose(self, info: VideoInfo, settings: VideoSettings, fps: float) -> Sequence[int]:
        wanted = info.frames / fps * settings.fps
        most = min(settings.max_frames, info.frames) // FRAMES_OF_A_PLANE * FRAMES_OF_A_PLANE
        count = int(min(max(wanted, settings.min_frames), most)) // FRAMES_OF_A_PLANE * FRAMES_OF_A_PLANE
        if not count:
            return range(info.frames)
        return [number * info.frames // count for number in range(count)]

    def resized(
        self, frames: int, height: int, width: int, *, cell: int, pixels: tuple[int, int]
    ) -> tuple[int, int]:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as of  # noqa: PLC0415 - heavy

        found: tuple[int, int] = of.smart_resize(height, width, cell, *pixels)
        return found

    def text(self, clip: Clip, rows: int) -> str:
        return self._token * (clip.grid[0] * rows)
