"""The CPU node of Gemma 3: an image, and perhaps parts of it, of equally many tokens that see one another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json_if_present
from models.vision_language.expansion import Seen
from models.vision_language.images import ImageAdapter
from models.vision_language.processing import VisionLanguageProcessing, read_processing
from shared.events import Media

PARTS: Final[Mapping[str, Any]] = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""The settings of parts, which the files of checkpoints leave to transformers."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return read_processing(checkpoint, Gemma3Adapter(checkpoint, media), max_seq_len=max_seq_len)


class Gemma3Adapter(ImageAdapter):
    """Images of one size, between a token for the start of an image and one for its end."""

    def __init__(self, checkpoint: Path, media: MediaReader | None) -> None:
        tokens = read_json_if_present(checkpoint / "tokenizer_config.json")
        tokens |= tokens.get("extra_special_tokens") or {}
        super().__init__(checkpoint, media, image_token=tokens.get("image_token", "<image_soft_token>"))
        start, end = tokens.get("boi_token", "<start_of_image>"), tokens.get("eoi_token", "<end_of_image>")
        self.placeholders = {"image": start}
        self._rows: Final[int] = self.settings.get("image_seq_length", 256)
        self._image: Final = f"\n\n{start}{self.token * self._rows}{end}\n\n"

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        in_parts = bool(options.get("do_pan_and_scan"))
        pixels = self.processed(medium, do_pan_and_scan=in_parts, **PARTS)["pixel_values"]
        return Seen(
            pixels=pixels,
            text=self._text(len(pixels) - 1),
            rows=self._rows * len(pixels),
            full=True,
            arguments=("parts",) if len(pixels) > 1 else (),
        )

    def _text(self, parts: int) -> str:
        """The text of an image and so many parts of it, in the words that the model was trained with."""
        if not parts:
            return self._image
        return (
            f"Here is the original image {self._image} and here are some crops to help you see better "
            + " ".join([self._image] * parts)
        )
