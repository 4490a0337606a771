"""Preprocessing of clips as a checkpoint's `video_preprocessor_config.json` says, and the choice of frames.

transformers' own video processors need torchvision. This is what they do with frames of eight bits: the
shorter side is resized (bilinear, antialiased), the centre cropped, and the colours are normalised.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from models.checkpoints.files import CheckpointError, read_json
from models.media.kinds import ChooseFrames, VideoInfo
from models.media.reader import MediaReader
from shared.events import Media

FILE: Final = "video_preprocessor_config.json"
IMAGE_FRAMES: Final = 16
"""The frames of an image, unless a request says how many."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTransform:
    """From frames to the pixels that a video encoder takes.

    Attributes:
        short: the shorter side of a resized frame.
        crop: the sides of the square that is cut out of its centre; at most `short`.
        mean, std: of the colours, in the range from 0 to 1.
    """

    short: int
    crop: int
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @classmethod
    def read(cls, checkpoint: Path, crop: int) -> "ClipTransform":
        """Read the settings of a checkpoint folder. `crop` is the default, for a folder without the file.

        Raises:
            CheckpointError: the file is malformed.
        """
        path = checkpoint / FILE
        settings: dict[str, Any] = dict(read_json(path)) if path.is_file() else {}
        try:
            stated = settings.get("crop_size") or crop
            crop = int(stated["height"] if isinstance(stated, dict) else stated)
            short = int((settings.get("size") or {}).get("shortest_edge") or crop * 256 // 224)
            mean = tuple(map(float, settings.get("image_mean") or _MEAN))
            std = tuple(map(float, settings.get("image_std") or _STD))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: expected the settings of a video processor: {error}") from error
        if not 0 < crop <= short or len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise CheckpointError(
                f"{path}: expected a crop of at most {short} and three colours, found {crop}"
            )
        return cls(short=short, crop=crop, mean=mean, std=std)

    def __call__(self, frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """(N, H, W, 3) uint8 -> (N, 3, crop, crop) float32."""
        found = np.empty((len(frames), 3, self.crop, self.crop), np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        for index, frame in enumerate(frames):
            found[index] = ((self._cropped(frame) / np.float32(255) - mean) / std).transpose(2, 0, 1)
        return found

    def _cropped(self, frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        height, width = frame.shape[:2]
        short = min(height, width)
        size = (self.short * width // short, self.short * height // short)
        left, top = ((length - self.crop) // 2 for length in size)
        if max(size) > 4 * self.short:
            # Of a very long frame only the centre is resized: the whole would take a multiple of its memory.
            begin, side = (
                (left * short / self.short, top * short / self.short),
                self.crop * short / self.short,
            )
            box = (*begin, min(begin[0] + side, width), min(begin[1] + side, height))
            square = Image.fromarray(frame).resize((self.crop, self.crop), Image.Resampling.BILINEAR, box)
            return np.asarray(square, np.float32)
        image = Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR)
        return np.asarray(image.crop((left, top, left + self.crop, top + self.crop)), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReader:
    """Reads a video, an animated image, or an image as a video that stands still, to pixels of an encoder.

    Attributes:
        frames: the frames of a video, unless a request says how many.
    """

    media: MediaReader
    transform: ClipTransform
    frames: int

    def pixels(self, medium: Media, frames: int | None) -> npt.NDArray[np.float32]:
        """(N, 3, H, W) float32: so many frames at equal distances, or all frames of a shorter video.

        Raises:
            MediaError: the medium is damaged, beyond a limit, or neither a video nor an image.
        """
        found = self.media.video(medium, choose=evenly(frames or self.frames))
        pixels = self.transform(found.frames)
        return pixels if found.info.frames > 1 else np.repeat(pixels, frames or IMAGE_FRAMES, axis=0)


def evenly(wanted: int) -> ChooseFrames:
    """Choose so many frames at equal distances from the first one; all frames of a shorter video."""

    def choose(video: VideoInfo) -> list[int]:
        count = min(wanted, video.frames)
        return [index * video.frames // count for index in range(count)]

    return choose
