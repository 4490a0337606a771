"""The CPU node of masked diffusion models; see `models.diffusion_text.processing`."""

from pathlib import Path
from typing import Final

from models.diffusion_text.processing import DiffusionTextProcessing, load_with

_TURN_ENDS: Final = ("<|eot_id|>", "<|im_end|>")
"""Tokens that end a turn of LLaDA's and Dream's chats; the files name only the one that ends a text."""


def load(checkpoint: Path, *, max_seq_len: int) -> DiffusionTextProcessing:
    """Load the tokenizer and the chat templates of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: a chat template is no valid Jinja.
    """
    return load_with(checkpoint, max_seq_len=max_seq_len, turn_ends=_TURN_ENDS)
