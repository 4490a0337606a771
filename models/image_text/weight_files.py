"""The weights that the node of an image-text encoder loads. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, safetensors


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for the node, besides those of processing."""
    return safetensors(checkpoint)
