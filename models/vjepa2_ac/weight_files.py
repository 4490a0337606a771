"""The file that the nodes of the family load. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files
from models.checkpoints.files import CheckpointError
from models.vjepa2_ac.settings import weights_of


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The file of weights; empty for a node that has none, or if it is missing: the loader says so."""
    if node == "mpc_scorer":
        return {}
    try:
        path = weights_of(checkpoint)
    except CheckpointError:
        return {}
    return {str(path.relative_to(checkpoint)): path}
