"""The CPU node of Mistral 3: images as Pixtral has them, with fewer tokens."""

from pathlib import Path

from models.base import MediaReader
from models.vision_language.images import PixtralAdapter
from models.vision_language.processing import VisionLanguageProcessing, read_processing


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return read_processing(checkpoint, PixtralAdapter(checkpoint, media), max_seq_len=max_seq_len)
