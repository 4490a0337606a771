"""The weights that the nodes of Orpheus load: the language model's, or SNAC's own folder. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.checkpoints.companions import find_companion
from models.checkpoints.contents import Files, safetensors, within
from models.checkpoints.weights import SINGLE

SNAC: Final = "snac_decoder"
"""The node that decodes audio."""
REPOSITORY: Final = "hubertsiuzdak/snac_24khz"
"""The repository of the published checkpoint of SNAC."""
PICKLE: Final = "pytorch_model.bin"
"""Its weights, as published. `model.safetensors` is preferred where it exists."""


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing.

    Raises:
        CheckpointError: SNAC was not found.
    """
    if node != SNAC:
        return safetensors(checkpoint)
    folder = find_snac(checkpoint, kwargs.get("snac"))
    weights = SINGLE if (folder / SINGLE).is_file() else PICKLE
    return within("snac", {name: folder / name for name in ("config.json", weights)})


def further_repositories(checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """SNAC, unless the checkpoint's folder has it."""
    return {} if (checkpoint / "snac").is_dir() else {REPOSITORY: ("config.json", SINGLE, PICKLE)}


def find_snac(checkpoint: Path, folder: str | None) -> Path:
    """The folder of the SNAC checkpoint.

    Raises:
        CheckpointError: it was not found (`models.checkpoints.companions`).
    """
    return find_companion(checkpoint, folder, "snac", REPOSITORY)
