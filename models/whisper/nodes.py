"""The torch nodes of Whisper: transformers' encoder, and its decoder over the KV pool.

encoder   features (bands, frames) -> states (frames / 2, hidden)
decoder   states -> the tokens of a window (`models.whisper.transcriber`)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration

from models.base import Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.speech_to_text.frames_decoder import NAME
from models.speech_to_text.halves import ENCODER, load_half
from models.text.tokenizer import load_tokenizer
from models.whisper.decoder import WhisperDecoder
from models.whisper.graph import MAX_POSITIONS, PROGRAM_NAME
from models.whisper.settings import WhisperSettings
from models.whisper.transcriber import Checkpoint, Transcribe
from shared.errors import BugError


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "WhisperDecoder | WhisperEncoder":
    """Load `encoder` or `decoder` of a checkpoint folder in Hugging Face format; `kwargs` are not used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node not in (ENCODER, NAME):
        raise BugError(f"whisper has no node {node!r} with weights; it has {ENCODER!r} and {NAME!r}")
    settings = WhisperSettings.read(checkpoint)
    model = load_half(
        WhisperForConditionalGeneration, checkpoint, node, torch.device(device), dtype, progress
    )
    if node == ENCODER:
        return WhisperEncoder(model)
    known = Checkpoint(
        settings=settings,
        generation=GenerationConfig.from_pretrained(str(checkpoint), local_files_only=True),
        decode=_decode_of(checkpoint, settings),
    )
    return WhisperDecoder(model, {PROGRAM_NAME: Transcribe(known)})


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence in cells.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    settings = WhisperSettings.read(checkpoint)
    read_shards(checkpoint)
    return max(settings.frames + settings.positions, MAX_POSITIONS)


class WhisperEncoder:
    """The encoder as a stateless node (`models.base.StatelessNode`).

    Windows are computed one by one: a batch of them would change their last bits, and a window is as long as
    a large batch of anything else.
    """

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `features`, (bands, frames), to `states`, (frames / 2, hidden) float32."""
        encode = self._model.model.encoder
        return [
            StatelessResult(
                outputs={
                    "states": encode(
                        item.inputs["features"][None].to(self._model.device, self._model.dtype)
                    ).last_hidden_state[0]
                }
            )
            for item in items
        ]


def _decode_of(checkpoint: Path, settings: WhisperSettings) -> Any:
    tokenizer, _ = load_tokenizer(checkpoint)

    def decode(tokens: Sequence[int]) -> str:
        text = [token for token in tokens if token < min(settings.first_time, settings.end)]
        found: str = tokenizer.decode(text, skip_special_tokens=True)
        return found.strip()

    return decode
