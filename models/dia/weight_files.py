"""The weights that the nodes of Dia load: the checkpoint's, or DAC's own folder. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.checkpoints.companions import find_companion
from models.checkpoints.contents import Files, safetensors, within
from models.checkpoints.weights import SINGLE
from models.dia.graph import CODEC

REPOSITORY: Final = "descript/dac_44khz"
"""The repository of the published codec."""


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing.

    Raises:
        CheckpointError: DAC was not found.
    """
    if node != CODEC:
        return safetensors(checkpoint)
    folder = find_dac(checkpoint, kwargs)
    return within(CODEC, {"config.json": folder / "config.json", **safetensors(folder)})


def further_repositories(checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """DAC, unless the checkpoint's folder has it."""
    return {} if (checkpoint / CODEC).is_dir() else {REPOSITORY: ("config.json", SINGLE)}


def find_dac(checkpoint: Path, kwargs: Mapping[str, Any]) -> Path:
    """The folder of DAC.

    Raises:
        CheckpointError: it was not found (`models.checkpoints.companions`).
    """
    return find_companion(checkpoint, kwargs.get(CODEC), CODEC, REPOSITORY)
