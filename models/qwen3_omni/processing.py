"""The CPU node `prepare` of Qwen3-Omni: its media, and its talker's prompt (`models.omni.processing`)."""

from functools import partial
from pathlib import Path
from typing import Final

from models.base import MediaReader
from models.checkpoints.files import read_json
from models.omni.processing import MediaTokens, OmniAdapter, OmniProcessing, read_omni
from models.omni.sounds import Hearing
from models.qwen3_omni.speech_prompts import SpeechPrompts
from models.qwen3_vl.processing import SIZE

_ROWS_OF_A_WINDOW: Final = 13
_HALVINGS: Final = 3
_TOKENS: Final = MediaTokens(image="<|image_pad|>", video="<|video_pad|>", audio="<|audio_pad|>")


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> OmniProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    thinker = read_json(checkpoint / "config.json").get("thinker_config") or {}
    window = 2 * (thinker.get("audio_config") or {}).get("n_window", 50)
    hearing = Hearing(checkpoint, partial(rows_of, window=window))
    adapter = OmniAdapter(checkpoint, media, hearing, _TOKENS, size=SIZE, max_tokens=max_seq_len)
    return read_omni(checkpoint, adapter, SpeechPrompts.read(checkpoint), max_seq_len=max_seq_len)


def rows_of(frames: int, window: int) -> int:
    """The rows that the encoder makes of so many frames, which it takes in windows of so many."""
    rest = frames % window
    for _ in range(_HALVINGS):
        rest = (rest + 1) // 2
    return rest + frames // window * _ROWS_OF_A_WINDOW
