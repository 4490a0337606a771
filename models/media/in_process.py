"""A reader of media in this process, without limits of memory and time: for tests and tools.

Workers decode in other processes (`workers.media`), for a hostile file can end the process that decodes it.
"""

import io
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from models.media.arrays import Arrays, read_arrays
from models.media.audio import audio_blocks, decode_audio
from models.media.audio_spans import audio_span
from models.media.chosen_frames import read_video
from models.media.images import decode_image
from models.media.kinds import ChooseFrames, MediaLimits, Video
from models.media.videos import open_video
from models.media.waveforms import Samples
from shared.events import Media


class InProcessReader:
    """Reads media from memory (`models.base.MediaReader`).

    Args:
        files: the bytes of each medium, by digest.
    """

    def __init__(self, files: Mapping[str, bytes], limits: MediaLimits | None = None) -> None:
        self._files = files
        self._limits = limits if limits is not None else MediaLimits()

    def image(self, medium: Media) -> npt.NDArray[np.uint8]:
        return decode_image(self._open(medium), self._limits)

    def video(self, medium: Media, *, choose: ChooseFrames) -> Video:
        with open_video(self._open(medium), self._limits) as source:
            return read_video(source, choose, self._limits)

    def audio(self, medium: Media, *, rate: int) -> npt.NDArray[np.float32]:
        return decode_audio(self._open(medium), rate, self._limits)

    def audio_blocks(self, medium: Media, *, rate: int, take: Callable[[Samples], None]) -> None:
        for block in audio_blocks(self._open(medium), rate, self._limits):
            take(block)

    def audio_span(self, medium: Media, *, rate: int, first: int, count: int) -> npt.NDArray[np.float32]:
        return audio_span(self._open(medium), rate, first, count, self._limits)

    def tensors(self, medium: Media) -> Arrays:
        return read_arrays(self._open(medium), self._limits)

    def _open(self, medium: Media) -> io.BytesIO:
        return io.BytesIO(self._files[medium.digest])
