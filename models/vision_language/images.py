"""Adapters of images that several families share (`models.vision_language.processing.Adapter`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json_if_present
from models.media.kinds import MediaError
from models.vision_language.expansion import Seen
from models.vision_language.processing import pillow_image, read_image_processor
from shared.events import Media

MAX_RESIZED_PIXELS: Final = 16_000_000
"""The most pixels of an image that is enlarged, before it is cropped."""


class ImageAdapter:
    """Base of the adapters of models that read images.

    Attributes:
        settings: the content of `processor_config.json`.
        images: transformers' own image processor.
    """

    def __init__(
        self, checkpoint: Path, media: MediaReader | None, *, image_token: str, **overrides: Any
    ) -> None:
        self.settings: Final = read_json_if_present(checkpoint / "processor_config.json")
        self.images: Final = read_image_processor(checkpoint, **overrides)
        self.token: Final[str] = self.settings.get("image_token") or image_token
        self.placeholders: Mapping[str, str] = {"image": self.token}
        self.row_tokens = frozenset({self.token})
        self._media: Final = media

    def processed(self, medium: Media, **settings: Any) -> Mapping[str, Any]:
        """The arrays that the image processor makes of an image, by name.

        Raises:
            ClientError: the image cannot be decoded, or the image processor refuses it.
        """
        image = pillow_image(self._media, medium)
        try:
            self._check_shape(image.size)
            found: Mapping[str, Any] = self.images(images=[image], return_tensors="np", **settings)
        except MediaError as error:
            error.digest = medium.digest
            raise
        except (ValueError, ArithmeticError) as error:
            unusable = _unusable(image.size, f"its image processor says: {error}")
            unusable.digest = medium.digest
            raise unusable from error
        return found

    def _check_shape(self, size: tuple[int, int]) -> None:
        """Refuse an image that becomes very large when its shorter side is resized to a fixed length."""
        shorter = getattr(self.images.size, "shortest_edge", None)
        if shorter and shorter**2 * max(size) / min(size) > MAX_RESIZED_PIXELS:
            raise _unusable(size, f"with a shorter side of {shorter} it has over {MAX_RESIZED_PIXELS} pixels")


def _unusable(size: tuple[int, int], why: str) -> MediaError:
    return MediaError(
        f"an image of {size[0]} x {size[1]} pixels cannot be read by this model: {why:.200}; send one with "
        "sides of similar length"
    )


class PixtralAdapter(ImageAdapter):
    """Images of Pixtral's tower: a row of tokens per row of patches, with a break after each."""

    def __init__(self, checkpoint: Path, media: MediaReader | None) -> None:
        super().__init__(checkpoint, media, image_token="[IMG]")  # noqa: S106 - not a password
        patch, merge = self.settings.get("patch_size", 16), self.settings.get("spatial_merge_size", 1)
        self._patch: Final[int] = patch * merge
        self._break: Final[str] = self.settings.get("image_break_token") or "[IMG_BREAK]"
        self._end: Final[str] = self.settings.get("image_end_token") or "[IMG_END]"

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        pixels = self.processed(medium, patch_size=self._patch)["pixel_values"][0]
        rows, columns = pixels.shape[1] // self._patch, pixels.shape[2] // self._patch
        text = self._break.join([self.token * columns] * rows) + self._end
        return Seen(pixels=pixels, text=text, rows=rows * columns)
