"""The CPU node of LLaVA: an image is a grid of patches, or of Pixtral's rows with a break after each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json, read_json_if_present
from models.vision_language.expansion import Seen
from models.vision_language.processing import (
    VisionLanguageProcessing,
    pillow_image,
    read_image_processor,
    read_processing,
)
from shared.events import Media


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return read_processing(checkpoint, LlavaAdapter(checkpoint, media), max_seq_len=max_seq_len)


class LlavaAdapter:
    """Images of one size, as many rows as patches (`models.vision_language.processing.Adapter`)."""

    def __init__(self, checkpoint: Path, media: MediaReader) -> None:
        settings = read_json_if_present(checkpoint / "processor_config.json")
        config = read_json(checkpoint / "config.json")
        vision = config.get("vision_config", {})
        self._media: Final = media
        self._images: Final = read_image_processor(checkpoint)
        self._token: Final = settings.get("image_token") or "<image>"
        self._patch: Final = settings.get("patch_size") or vision.get("patch_size", 14)
        strategy = settings.get("vision_feature_select_strategy") or config.get(
            "vision_feature_select_strategy"
        )
        self._extra: Final = settings.get("num_additional_image_tokens", 0) - (strategy == "default")
        self.placeholders: Final = {"image": self._token}
        self.row_tokens: Final = frozenset({self._token})

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        image = pillow_image(self._media, medium)
        pixels = self._images(images=[image], return_tensors="np")["pixel_values"][0]
        rows = (pixels.shape[1] // self._patch) * (pixels.shape[2] // self._patch) + self._extra
        return Seen(pixels=pixels, text=self._token * rows, rows=rows)
