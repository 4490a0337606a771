"""The CPU node of InternVL: an image is one tile, or several and a thumbnail, of equally many tokens each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json_if_present
from models.vision_language.expansion import Seen
from models.vision_language.images import ImageAdapter
from models.vision_language.processing import VisionLanguageProcessing, read_processing
from shared.events import Media


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return read_processing(checkpoint, InternVLAdapter(checkpoint, media), max_seq_len=max_seq_len)


class InternVLAdapter(ImageAdapter):
    """Tiles one after the other, between a token for the start of an image and one for its end."""

    def __init__(self, checkpoint: Path, media: MediaReader | None) -> None:
        tokens = read_json_if_present(checkpoint / "tokenizer_config.json")
        tokens |= tokens.get("extra_special_tokens") or {}
        super().__init__(checkpoint, media, image_token=tokens.get("context_image_token", "<IMG_CONTEXT>"))
        self._start: Final[str] = tokens.get("start_image_token", "<img>")
        self._end: Final[str] = tokens.get("end_image_token", "</img>")
        self._rows: Final[int] = self.settings.get("image_seq_length", 256)

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        pixels = self.processed(medium, crop_to_patches=True)["pixel_values"]
        rows = self._rows * len(pixels)
        return Seen(pixels=pixels, text=f"{self._start}{self.token * rows}{self._end}", rows=rows)
