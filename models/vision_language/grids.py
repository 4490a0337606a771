"""Images and videos of any size as grids of patches, as Qwen's models read them: settings, frames, pixels.

A medium is resized to whole cells, a cell is a square of patches that becomes one row of the tower. Two
frames of a video, one after the other, are one plane of patches; an image is a plane of two equal frames.
Transformers' video processors need torchvision, so the frames of a video go through its image processor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from models.base import MediaReader
from models.checkpoints.files import CheckpointError, read_json_if_present
from models.media.kinds import MediaError, MediaTooLargeError, VideoInfo
from models.vision_language.expansion import Seen
from models.vision_language.frame_options import FrameOptions
from models.vision_language.images import ImageAdapter
from models.vision_language.processing import reader_of
from shared.events import Media

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"
UNKNOWN_FPS: Final = 24.0
"""The frames per second of a video whose file does not say."""


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a checkpoint's video processor that are read here; `size` are numbers of pixels."""

    size: Mapping[str, int]
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def read(cls, checkpoint: Path, **defaults: Any) -> Self:
        """Read them where transformers does: in the first of three files.

        Raises:
            CheckpointError: the file is malformed.
        """
        found = read_json_if_present(checkpoint / "processor_config.json").get("video_processor")
        for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
            found = found or read_json_if_present(checkpoint / name)
        given = {key: value for key, value in (found or {}).items() if value is not None}
        given["size"] = defaults["size"] | (given.get("size") or {})
        try:
            return msgspec.convert(defaults | given, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{checkpoint}: the settings of its video processor: {error}") from error

    @property
    def pixels(self) -> tuple[int, int]:
        """The fewest and the most pixels."""
        return (
            self.min_pixels if self.min_pixels is not None else self.size["shortest_edge"],
            self.max_pixels if self.max_pixels is not None else self.size["longest_edge"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The frames that were taken of a video, as planes of patches.

    Attributes:
        pixels: (planes * rows * columns, numbers of a patch), float32.
        grid: planes, rows and columns, in patches.
        indices: the frames taken.
        frames: the frames of the whole video.
        fps: its frames per second.
    """

    pixels: "npt.NDArray[np.float32]"
    grid: tuple[int, int, int]
    indices: Sequence[int]
    frames: int
    fps: float


class VideoRules(Protocol):
    """A family's choice of frames and of their size."""

    def choose(self, info: VideoInfo, settings: VideoSettings, fps: float) -> Sequence[int]:
        """The indices of the frames to take; `fps` is the video's."""
        ...

    def resized(
        self, frames: int, height: int, width: int, *, cell: int, pixels: tuple[int, int]
    ) -> tuple[int, int]:
        """Height and width of resized frames.

        Raises:
            ValueError: a frame is too long or too narrow.
        """
        ...

    def text(self, clip: Clip, rows: int) -> str:
        """The text that replaces a video's placeholder, with `rows` row tokens for each plane."""
        ...


class GridAdapter(ImageAdapter):
    """An adapter of images and videos as grids (`models.vision_language.processing.Adapter`)."""

    def __init__(
        self,
        checkpoint: Path,
        media: MediaReader | None,
        rules: VideoRules,
        *,
        size: Mapping[str, int],
        max_tokens: int,
        image_token: str = IMAGE,
    ) -> None:
        super().__init__(checkpoint, media, image_token=image_token)
        self.placeholders = {"image": self.token, "video": VIDEO}
        self.row_tokens = frozenset(self.placeholders.values())
        self._settings: Final = VideoSettings.read(checkpoint, size=size)
        self._rules: Final = rules
        self._max_tokens: Final = max_tokens

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        if medium.modality == "video":
            clip = self._clip(medium, msgspec.convert(options, FrameOptions))
            return self.seen(clip)
        found = self.processed(medium)
        pixels = found["pixel_values"]
        grid = tuple(int(one) for one in found["image_grid_thw"][0])
        rows = len(pixels) // self.images.merge_size**2
        return Seen(pixels=pixels, text=self.token * rows, rows=rows, grid=grid)

    def seen(self, clip: Clip) -> Seen:
        """A video as its tower and its prompt take it."""
        rows = len(clip.pixels) // self.images.merge_size**2
        return Seen(
            pixels=clip.pixels,
            text=self._rules.text(clip, rows // clip.grid[0]),
            rows=rows,
            grid=clip.grid,
            seconds=self.images.temporal_patch_size * clip.frames / (len(clip.indices) * clip.fps),
            arguments=("video", *clip.indices),
        )

    def _check_shape(self, *_: Any) -> None:
        """The edges in the settings are numbers of pixels, which bound any image."""

    def _clip(self, medium: Media, options: FrameOptions) -> Clip:
        wanted = {key: value for key, value in msgspec.structs.asdict(options).items() if value is not None}
        settings = msgspec.structs.replace(self._settings, **wanted)

        def choose(info: VideoInfo) -> Sequence[int]:
            return self._rules.choose(info, settings, info.fps or UNKNOWN_FPS)

        video = reader_of(self._media).video(medium, choose=choose)
        try:
            pixels, grid = self._planes(video.frames, settings)
        except MediaError as error:
            error.digest = medium.digest
            raise
        return Clip(
            pixels=pixels,
            grid=grid,
            indices=video.indices,
            frames=video.info.frames,
            fps=video.info.fps or UNKNOWN_FPS,
        )

    def _planes(
        self, frames: "npt.NDArray[np.uint8]", settings: VideoSettings
    ) -> tuple["npt.NDArray[np.float32]", tuple[int, int, int]]:
        """The patches of frames, those of each plane together, and their grid."""
        import numpy as np  # noqa: PLC0415 - only for media
        from PIL import Image  # noqa: PLC0415

        of = self.images
        depth, cell = of.temporal_patch_size, of.patch_size * of.merge_size
        height, width = self._resized(frames.shape, settings, cell)
        rows, columns = height // of.patch_size, width // of.patch_size
        planes = -(-len(frames) // depth)
        tokens = planes * rows * columns // of.merge_size**2
        if tokens > self._max_tokens:
            raise MediaTooLargeError(
                f"a video of {len(frames)} frames makes {tokens} tokens, expected at most "
                f"{self._max_tokens}: ask for fewer frames by `fps` or `max_frames`"
            )
        # A patch is (channels, frames of its plane, rows, columns); the last frame fills up its plane.
        pixels = np.empty((planes, rows * columns, 3, depth, of.patch_size**2), np.float32)
        for number in range(planes * depth):
            frame = Image.fromarray(frames[min(number, len(frames) - 1)])
            small = frame.resize((width, height), of.resample)
            patches = of(images=[small], do_resize=False, return_tensors="np")["pixel_values"]
            # An image is a plane of equal frames: the first of them is enough.
            first = patches.reshape(rows * columns, 3, depth, -1)[:, :, 0]
            pixels[number // depth, :, :, number % depth] = first
        return pixels.reshape(planes * rows * columns, -1), (planes, rows, columns)

    def _resized(self, shape: Sequence[int], settings: VideoSettings, cell: int) -> tuple[int, int]:
        """Height and width of frames, (N, H, W, 3), after resizing."""
        frames, height, width = shape[:3]
        try:
            return self._rules.resized(frames, height, width, cell=cell, pixels=settings.pixels)
        except ValueError as error:
            raise MediaError(f"a video of {width} x {height} pixels cannot be read: {error}") from error
