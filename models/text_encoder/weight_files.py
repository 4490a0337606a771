"""The weights that the node of a text encoder loads, those of the modules behind it included. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, safetensors
from models.text.embedding import modules_of


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for the node, besides those of processing."""
    found = dict(safetensors(checkpoint))
    for module in modules_of(checkpoint):
        if module.path:
            folder = checkpoint / module.path
            files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
            found |= {str(path.relative_to(checkpoint)): path for path in files if path.is_file()}
    return found
