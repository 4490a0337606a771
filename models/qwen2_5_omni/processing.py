"""The CPU node `prepare` of Qwen2.5-Omni: its media, and its talker's prompt (`models.omni.processing`)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.base import MediaReader
from models.checkpoints.files import read_json
from models.omni.films import FilmTokens
from models.omni.processing import OmniAdapter, OmniProcessing, read_omni
from models.omni.sounds import Hearing
from models.qwen2_5_omni.speech_prompts import SpeechPrompts
from models.qwen2_5_vl.processing import SIZE

if TYPE_CHECKING:
    import numpy as np

_IMAGE: Final = "<|IMAGE|>"


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> OmniProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    hearing = Hearing(checkpoint, rows_of, fills_up=True)
    thinker = read_json(checkpoint / "config.json").get("thinker_config") or {}
    per_second = thinker.get("position_id_per_seconds", 25)
    tokens = FilmTokens(
        video="<|VIDEO|>",
        audio="<|AUDIO|>",
        begin="<|audio_bos|>",
        end="<|audio_eos|>",
        per_second=per_second,
        order=partial(in_chunks, length=int(per_second * thinker.get("seconds_per_chunk", 2))),
    )
    adapter = OmniAdapter(
        checkpoint, media, hearing, tokens, size=SIZE, max_tokens=max_seq_len, image_token=_IMAGE
    )
    return read_omni(checkpoint, adapter, SpeechPrompts.read(checkpoint), max_seq_len=max_seq_len)


def rows_of(frames: int) -> int:
    """The rows that the encoder makes of so many frames: a convolution halves them, then the mean of two."""
    return max(0, (frames + 1) // 2 // 2)


def in_chunks(times: "np.ndarray", sounds: int, *, length: int) -> Sequence[bool]:
    """The order of the rows of a film: chunks of two seconds, in each those of the video first.

    A chunk has the rows before its end that are in no earlier one, and the first row after a gap begins the
    next chunk, as transformers counts them.
    """
    moments = [(chunk, False) for chunk in _chunks(times.tolist(), length)]
    moments += [(chunk, True) for chunk in _chunks(range(sounds), length)]
    return [is_sound for _, is_sound in sorted(moments)]


def _chunks(times: Sequence[float], length: int) -> Sequence[int]:
    found, chunk = list[int](), 0
    for time in times:
        if time >= (chunk + 1) * length:
            chunk += 1
        found.append(chunk)
    return found
