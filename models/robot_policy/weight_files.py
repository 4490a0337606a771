"""The files that decide the actions of a policy: weights, statistics, and the tokenizer. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.checkpoints.contents import Files, processing_files, safetensors, within

TOKENIZER: Final = "google/paligemma-3b-pt-224"
"""The repository of the tokenizer; checkpoints of lerobot have none."""
TOKENIZER_FILE: Final = "tokenizer.json"


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


def further_repositories(checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """The repository of the tokenizer, unless the checkpoint's folder has one."""
    return {} if (checkpoint / TOKENIZER_FILE).is_file() else {TOKENIZER: (TOKENIZER_FILE,)}
