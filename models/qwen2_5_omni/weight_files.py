"""The weights that the nodes of Qwen2.5-Omni load: parts of the checkpoint's files, and voices. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.checkpoints.contents import Files
from models.vision_language.weight_files import weight_files as of_the_kit

VOICES: Final = "spk_dict.pt"


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing."""
    voices = {VOICES: checkpoint / VOICES} if (checkpoint / VOICES).is_file() else {}
    return {**of_the_kit(checkpoint, node, kwargs), **voices}
