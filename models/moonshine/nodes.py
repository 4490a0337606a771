"""The torch nodes of Moonshine: transformers' encoder, and its decoder over the KV pool.

encoder   samples (N,) -> states (frames, hidden)
decoder   states -> the tokens of a window (`models.speech_to_text.window_program`)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import MoonshineForConditionalGeneration, MoonshineStreamingForConditionalGeneration

from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.moonshine.decoder import MoonshineDecoder, StreamingDecoder
from models.moonshine.settings import MoonshineSettings
from models.speech_to_text.frames_decoder import NAME
from models.speech_to_text.halves import ENCODER, load_half
from models.speech_to_text.window_program import WriteText
from models.speech_to_text.windows import HEARD, PROGRAM_NAME
from shared.errors import BugError


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "MoonshineDecoder | MoonshineEncoder":
    """Load `encoder` or `decoder` of a checkpoint folder in Hugging Face format; `kwargs` are not used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node not in (ENCODER, NAME):
        raise BugError(f"moonshine has no node {node!r} with weights; it has {ENCODER!r} and {NAME!r}")
    settings = _settings(checkpoint)
    model_class, decoder_class = (
        (MoonshineStreamingForConditionalGeneration, StreamingDecoder)
        if settings.is_streaming
        else (MoonshineForConditionalGeneration, MoonshineDecoder)
    )
    model = load_half(model_class, checkpoint, node, torch.device(device), dtype, progress)
    if node == ENCODER:
        return MoonshineEncoder(model)
    return decoder_class(
        model,
        {PROGRAM_NAME: WriteText("moonshine", {settings.end})},
        heads=int(model.config.num_key_value_heads),
        positions=settings.positions,
        max_positions=settings.longest_sequence,
    )


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence in cells.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    settings = _settings(checkpoint)
    read_shards(checkpoint)
    return settings.longest_sequence


class MoonshineEncoder:
    """The encoder as a stateless node (`models.base.StatelessNode`).

    Windows are computed one by one: padding to the longest of a batch would change their last bits.
    """

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's samples, (N,), to `states`, (frames, hidden). The argument `count` is theirs."""
        return [
            StatelessResult(outputs={"states": self._encode(item.inputs[HEARD], item.args["count"])})
            for item in items
        ]

    def _encode(self, samples: torch.Tensor, count: int) -> torch.Tensor:
        """The states of the first `count` samples; the others are padding."""
        values = samples[None].to(self._model.device, self._model.dtype)
        mask = torch.arange(len(samples), device=values.device)[None] < count
        found = self._model.model.encoder(values, attention_mask=mask)
        states: torch.Tensor = found.last_hidden_state[0][found.attention_mask[0].bool()]
        return states


def _settings(checkpoint: Path) -> MoonshineSettings:
    """The settings of a checkpoint, if transformers' class can run its heads.

    That of the streaming version runs all, the other one those that have keys of their own.
    """
    config, settings = read_json(checkpoint / "config.json"), MoonshineSettings.read(checkpoint)
    for half in () if settings.is_streaming else ("encoder", "decoder"):
        heads = config.get(f"{half}_num_attention_heads", 8)
        found = config.get(f"{half}_num_key_value_heads") or heads
        if found != heads or heads != config.get("decoder_num_attention_heads", 8):
            raise CheckpointError(
                f"{checkpoint / 'config.json'}: expected the same number of heads, and of heads of keys, in "
                f"encoder and decoder, as transformers does; found {heads} and {found} in the {half}"
            )
    return settings
