"""The reader of media that families get (`processing.load(..., media=)`): its interface."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from models.media.kinds import ChooseFrames, Video
from shared.events import Media

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class MediaReader(Protocol):
    """Decodes the media of requests, within the deployment's limits.

    A family whose `processing.load` has a parameter `media` gets one. The methods block, and are called from
    `Processing.run`, with media of the request (`Inputs.files`) and no others. The same medium gives the same
    array. All of them raise `models.media.kinds.MediaError` for a medium that is damaged, too large or of
    another kind, and `CapacityError` if no decoder is free in time.
    """

    def image(self, medium: Media) -> "npt.NDArray[np.uint8]":
        """Decode an image to (H, W, 3) uint8, RGB, rotated as its EXIF data say.

        Of an animation it is the first frame; transparency is dropped, as pillow's `convert("RGB")` does.
        """
        ...

    def video(self, medium: Media, *, choose: ChooseFrames) -> Video:
        """Decode the frames of a video, or of an animated image, that `choose` chooses."""
        ...

    def audio(self, medium: Media, *, rate: int) -> "npt.NDArray[np.float32]":
        """Decode audio, or the audio of a video, to (N,) float32 from -1 to 1.

        It is mixed to one channel, and resampled to `rate` samples per second.
        """
        ...

    def audio_blocks(
        self, medium: Media, *, rate: int, take: "Callable[[npt.NDArray[np.float32]], None]"
    ) -> None:
        """Decode audio as `audio` does, block by block: `take` gets them in order.

        It may be of any length: no more than a block is in memory.
        """
        ...

    def audio_span(self, medium: Media, *, rate: int, first: int, count: int) -> "npt.NDArray[np.float32]":
        """Decode a part of the audio: `count` samples from sample `first` on, fewer at the end of the file.

        The samples before it are not decoded, except for those that the codec or the filter needs. They are
        those of `audio` up to rounding.
        """
        ...

    def tensors(self, medium: Media) -> "Mapping[str, npt.NDArray[Any]]":
        """Read the arrays of an npz or safetensors file, by name."""
        ...
