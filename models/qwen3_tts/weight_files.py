"""The weights that the nodes of Qwen3-TTS load: the talker's, or those of the codec's folder. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, processing_files, safetensors, within
from models.qwen3_tts.folder import CODEC_FOLDER
from models.qwen3_tts.graph import CODEC


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing."""
    if node != CODEC:
        return safetensors(checkpoint)
    folder = checkpoint / CODEC_FOLDER
    return within(CODEC_FOLDER, {**processing_files(folder), **safetensors(folder)})
