"""The weights that the nodes load: the checkpoint's, or those of the codec's own folder. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.checkpoints.companions import find_companion
from models.checkpoints.contents import Files, safetensors, within
from models.checkpoints.weights import SINGLE
from models.higgs_audio_v2.graph import CODEC, COMPANION

REPOSITORY: Final = "bosonai/higgs-audio-v2-tokenizer"
"""The repository of the published codec."""


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing.

    Raises:
        CheckpointError: the codec was not found.
    """
    if node != CODEC:
        return safetensors(checkpoint)
    folder = find_codec(checkpoint, kwargs)
    return within(COMPANION, {"config.json": folder / "config.json", **safetensors(folder)})


def further_repositories(checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """The codec, unless the checkpoint's folder has it."""
    return {} if (checkpoint / COMPANION).is_dir() else {REPOSITORY: ("config.json", SINGLE)}


def find_codec(checkpoint: Path, kwargs: Mapping[str, Any]) -> Path:
    """The folder of the codec.

    Raises:
        CheckpointError: it was not found (`models.checkpoints.companions`).
    """
    return find_companion(checkpoint, kwargs.get(COMPANION), COMPANION, REPOSITORY)
