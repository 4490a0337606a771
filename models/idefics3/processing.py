"""The CPU node of Idefics3: an image is a grid of tiles with their places before them, and a thumbnail."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.vision_language.expansion import Seen
from models.vision_language.images import ImageAdapter
from models.vision_language.processing import VisionLanguageProcessing, read_processing
from shared.events import Media

FENCE: Final = "<fake_token_around_image>"
WHOLE: Final = "<global-img>"


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return read_processing(checkpoint, Idefics3Adapter(checkpoint, media), max_seq_len=max_seq_len)


class Idefics3Adapter(ImageAdapter):
    """Tiles of equally many tokens, by rows."""

    def __init__(self, checkpoint: Path, media: MediaReader | None) -> None:
        super().__init__(checkpoint, media, image_token="<image>")  # noqa: S106 - not a password
        self._rows: Final[int] = self.settings.get("image_seq_len", 169)

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        found = self.processed(medium, return_row_col_info=True)
        pixels = found["pixel_values"][0]
        text = self._text(int(found["rows"][0][0]), int(found["cols"][0][0]))
        return Seen(pixels=pixels, text=text, rows=self._rows * len(pixels))

    def _text(self, rows: int, columns: int) -> str:
        """The text of an image of so many tiles; of no tiles, it is one as a whole."""
        tile = self.token * self._rows
        lines = [
            "".join(f"{FENCE}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{FENCE}{WHOLE}{tile}{FENCE}"
