"""The CPU node `prepare` of Qwen2.5-Omni: its media, and its talker's prompt (`models.omni.processing`)."""

from pathlib import Path
from typing import Final

from models.base import MediaReader
from models.omni.processing import MediaTokens, OmniAdapter, OmniProcessing, read_omni
from models.omni.sounds import Hearing
from models.qwen2_5_omni.speech_prompts import SpeechPrompts
from models.qwen2_5_vl.processing import SIZE

_TOKENS: Final = MediaTokens(image="<|IMAGE|>", video="<|VIDEO|>", audio="<|AUDIO|>")


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> OmniProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    hearing = Hearing(checkpoint, rows_of, fills_up=True)
    adapter = OmniAdapter(checkpoint, media, hearing, _TOKENS, size=SIZE, max_tokens=max_seq_len)
    return read_omni(checkpoint, adapter, SpeechPrompts.read(checkpoint), max_seq_len=max_seq_len)


def rows_of(frames: int) -> int:
    """The rows that the encoder makes of so many frames: a convolution halves them, then the mean of two."""
    return max(0, (frames + 1) // 2 // 2)
