"""The torch nodes of Whisper: transformers' encoder, and its decoder over the KV pool.

encoder   features (bands, frames) -> states (frames / 2, hidden)
decoder   states -> the tokens of a window (`models.whisper.transcriber`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration

from models.base import Item, StatelessResult
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.text.tokenizer import load_tokenizer
from models.transformers_lm.architecture import choose_dtype, config_of
from models.transformers_lm.tensors import load_weights
from models.whisper.decoder import NAME, WhisperDecoder
from models.whisper.graph import MAX_POSITIONS, PROGRAM_NAME
from models.whisper.settings import WhisperSettings
from models.whisper.transcriber import Checkpoint, Transcribe
from shared.errors import BugError

ENCODER: Final = "encoder"


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
    model = _half(checkpoint, node, torch.device(device), dtype, progress)
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


def _half(checkpoint: Path, node: str, device: torch.device, dtype: str, progress: Progress) -> Any:
    """The class without its other half. The tensors of that are never read."""
    model_class = WhisperForConditionalGeneration
    config = config_of(model_class, read_json(checkpoint / "config.json"), checkpoint)
    shards = [
        replace(
            shard,
            tensors={k: v for k, v in shard.tensors.items() if (".encoder." in f".{k}") == (node == ENCODER)},
        )
        for shard in read_shards(checkpoint)
    ]
    half = _encoder_half(model_class) if node == ENCODER else _decoder_half(model_class)
    return load_weights(half, config, shards, device, choose_dtype(dtype, device, shards), progress)


def _decoder_half(model_class: Any) -> Any:
    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.model.encoder = None

    return _subclass(model_class, begin)


def _encoder_half(model_class: Any) -> Any:
    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.model.decoder, self.proj_out = None, None

    # Transformers ties the embeddings of the decoder, which is not there.
    return _subclass(model_class, begin, _tied_weights_keys={}, get_input_embeddings=lambda _: None)


def _subclass(model_class: Any, begin: Any, **attributes: Any) -> Any:
    # Transformers selects its rules by the name of the class.
    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": begin} | attributes)


def _decode_of(checkpoint: Path, settings: WhisperSettings) -> Any:
    tokenizer, _ = load_tokenizer(checkpoint)

    def decode(tokens: Sequence[int]) -> str:
        text = [token for token in tokens if token < min(settings.first_time, settings.end)]
        found: str = tokenizer.decode(text, skip_special_tokens=True)
        return found.strip()

    return decode
