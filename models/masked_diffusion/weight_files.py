"""The weights that the node of a masked diffusion model loads: its own, and its verifier's. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, safetensors
from models.diffusion_text.apd_options import VERIFIER_FOLDER


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing."""
    verifier = kwargs.get(VERIFIER_FOLDER)
    if verifier is None:
        return safetensors(checkpoint)
    beside = {f"{VERIFIER_FOLDER}/{name}": path for name, path in safetensors(Path(verifier)).items()}
    return {**safetensors(checkpoint), **beside}
