"""The files that decide what Whisper hears: weights, tokenizer, and the rules of its tokens. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, processing_files, safetensors


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The weights of a node, and the small files beside them."""
    return {**safetensors(checkpoint), **processing_files(checkpoint)}
