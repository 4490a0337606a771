"""The CPU nodes of Pi0.5: the state is a part of the prompt, as numbers from 0 to 255."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.base import MediaReader
from models.pi05.graph import MAX_TOKENS
from models.robot_policy.processing import PolicyProcessing, load_processing
from models.robot_policy.prompts import state_prompt


def load(
    checkpoint: Path, *, max_seq_len: int, media: MediaReader, kwargs: Mapping[str, Any]
) -> PolicyProcessing:
    """Load the CPU nodes of a checkpoint; see `load_processing`."""
    return load_processing(
        checkpoint,
        media,
        max_seq_len=max_seq_len,
        kwargs=kwargs,
        prompt=state_prompt,
        sends_state=False,
        max_tokens=MAX_TOKENS,
        quantiles=True,
    )
