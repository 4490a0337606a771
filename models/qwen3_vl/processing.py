"""The CPU node of Qwen3-VL: images and videos as grids; the time in the video stands before each plane."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from models.base import MediaReader
from models.media.kinds import VideoInfo
from models.vision_language.expansion import Seen
from models.vision_language.frame_sizes import FRAMES_OF_A_PLANE, size_within_volume
from models.vision_language.grids import VIDEO, Clip, GridAdapter, VideoSettings
from models.vision_language.processing import VisionLanguageProcessing, read_processing

SIZE: Final = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""The pixels of all frames together where the checkpoint does not say."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    adapter = Qwen3VLAdapter(checkpoint, media, Qwen3VideoRules(), size=SIZE, max_tokens=max_seq_len)
    return read_processing(checkpoint, adapter, max_seq_len=max_seq_len)


class Qwen3VLAdapter(GridAdapter):
    """Videos as runs of tokens, one for each plane."""

    def seen(self, clip: Clip) -> Seen:
        planes, *plane = clip.grid
        return replace(super().seen(clip), grids=[(1, *plane)] * planes, seconds=0.0)


class Qwen3VideoRules:
    """Frames from the first to the last, with a number of pixels for all of them."""

    def choose(self, info: VideoInfo, settings: VideoSettings, fps: float) -> Sequence[int]:
        wanted = int(info.frames / fps * settings.fps)
        count = min(max(wanted, settings.min_frames), settings.max_frames, info.frames)
        if count == 1:
            return [0] * FRAMES_OF_A_PLANE
        import numpy as np  # noqa: PLC0415 - only for media

        chosen: list[int] = np.linspace(0, info.frames - 1, count).round().astype(int).tolist()
        return chosen

    def resized(
        self, frames: int, height: int, width: int, *, cell: int, pixels: tuple[int, int]
    ) -> tuple[int, int]:
        return size_within_volume(frames, height, width, cell=cell, pixels=pixels)

    def text(self, clip: Clip, rows: int) -> str:
        # As transformers 5 writes it, within the two tokens that the chat template writes around a video.
        times = [index / clip.fps for index in clip.indices]
        times += [times[-1]] * (-len(times) % FRAMES_OF_A_PLANE)
        pairs = zip(times[::2], times[1::2], strict=True)
        plane = f"<|vision_start|>{VIDEO * rows}<|vision_end|>"
        return "".join(f"<{(first + last) / 2:.1f} seconds>{plane}" for first, last in pairs)
