"""Transformers' own extractors of features, read from a checkpoint folder."""

from pathlib import Path
from typing import Any

from models.checkpoints.files import CheckpointError


def read_extractor(kind: Any, checkpoint: Path) -> Any:
    """An extractor with the settings of a checkpoint.

    Args:
        kind: a class of transformers, such as `WhisperFeatureExtractor`.
        checkpoint: the folder.

    Raises:
        CheckpointError: the file with the settings is missing or malformed.
    """
    try:
        return kind.from_pretrained(str(checkpoint), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint}: expected the settings of {kind.__name__} in preprocessor_config.json or "
            f"processor_config.json: {' '.join(str(error).split()):.300}"
        ) from error
