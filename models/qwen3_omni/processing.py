"""The CPU node `prepare` of Qwen3-Omni: its media, and its talker's prompt (`models.omni.processing`)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.base import MediaReader
from models.checkpoints.files import read_json
from models.omni.films import FilmTokens
from models.omni.processing import OmniAdapter, OmniProcessing, read_omni
from models.omni.sounds import Hearing
from models.qwen3_omni.speech_prompts import SpeechPrompts
from models.qwen3_vl.processing import SIZE
from models.vision_language.grids import IMAGE, VIDEO

if TYPE_CHECKING:
    import numpy as np

_ROWS_OF_A_WINDOW: Final = 13
_HALVINGS: Final = 3


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> OmniProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    thinker = read_json(checkpoint / "config.json").get("thinker_config") or {}
    window = 2 * (thinker.get("audio_config") or {}).get("n_window", 50)
    hearing = Hearing(checkpoint, partial(rows_of, window=window))
    tokens = FilmTokens(
        video=VIDEO,
        audio="<|audio_pad|>",
        begin="<|audio_start|>",
        end="<|audio_end|>",
        per_second=thinker.get("position_id_per_seconds", 25),
        order=by_time,
    )
    adapter = OmniAdapter(
        checkpoint, media, hearing, tokens, size=SIZE, max_tokens=max_seq_len, image_token=IMAGE
    )
    return read_omni(checkpoint, adapter, SpeechPrompts.read(checkpoint), max_seq_len=max_seq_len)


def rows_of(frames: int, window: int) -> int:
    """The rows that the encoder makes of so many frames, which it takes in windows of so many."""
    rest = frames % window
    for _ in range(_HALVINGS):
        rest = (rest + 1) // 2
    return rest + frames // window * _ROWS_OF_A_WINDOW


def by_time(times: "np.ndarray", sounds: int) -> Sequence[bool]:
    """The order of the rows of a film: each by its own time, those of the video first."""
    moments = [(time, False) for time in times.tolist()] + [(float(one), True) for one in range(sounds)]
    return [is_sound for _, is_sound in sorted(moments)]
