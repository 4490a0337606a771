"""The CPU nodes of Pi0: the state goes to the expert as numbers, and is no part of the prompt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.base import MediaReader
from models.pi0.graph import MAX_TOKENS
from models.robot_policy.processing import PolicyProcessing, load_processing
from models.robot_policy.prompts import instruction_prompt


def load(
    checkpoint: Path, *, max_seq_len: int, media: MediaReader, kwargs: Mapping[str, Any]
) -> PolicyProcessing:
    """Load the CPU nodes of a checkpoint; see `load_processing`."""
    return load_processing(
        checkpoint,
        media,
        max_seq_len=max_seq_len,
        kwargs=kwargs,
        prompt=instruction_prompt,
        sends_state=True,
        max_tokens=MAX_TOKENS,
        quantiles=False,
    )
