"""The CPU node of LLaVA: an image is a grid of patches, or of Pixtral's rows with a break after each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json
from models.vision_language.expansion import Seen
from models.vision_language.images import ImageAdapter, PixtralAdapter
from models.vision_language.processing import VisionLanguageProcessing, read_processing
from shared.events import Media


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    config = read_json(checkpoint / "config.json")
    is_pixtral = config.get("vision_config", {}).get("model_type") == "pixtral"
    adapter = PixtralAdapter(checkpoint, media) if is_pixtral else LlavaAdapter(checkpoint, media, config)
    return read_processing(checkpoint, adapter, max_seq_len=max_seq_len)


class LlavaAdapter(ImageAdapter):
    """Images of one size, as many rows as patches."""

    def __init__(self, checkpoint: Path, media: MediaReader | None, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, media, image_token="<image>")  # noqa: S106 - not a password
        name = "vision_feature_select_strategy"
        is_cropped = (self.settings.get(name) or config.get(name, "default")) == "default"
        patch = self.settings.get("patch_size") or config.get("vision_config", {}).get("patch_size", 14)
        self._patch: Final[int] = patch
        self._more: Final[int] = self.settings.get("num_additional_image_tokens", 0) - is_cropped

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        pixels = self.processed(medium)["pixel_values"][0]
        rows = (pixels.shape[1] // self._patch) * (pixels.shape[2] // self._patch) + self._more
        return Seen(pixels=pixels, text=self.token * rows, rows=rows)
