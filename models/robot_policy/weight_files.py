"""The files that decide the actions of a policy: weights, statistics, and the tokenizer. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, processing_files, safetensors, within


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The weights of a node, the statistics of the checkpoint, and a tokenizer in another folder."""
    patterns = ("policy_*.safetensors", "assets/**/norm_stats.json")
    statistics = {
        str(path.relative_to(checkpoint)): path
        for pattern in patterns
        for path in sorted(checkpoint.glob(pattern))
    }
    tokenizer = kwargs.get("tokenizer")
    named = within("tokenizer", processing_files(Path(tokenizer).expanduser())) if tokenizer else {}
    return {**safetensors(checkpoint), **statistics, **named}
