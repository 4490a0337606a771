"""The torch nodes of Cohere Transcribe: transformers' Conformer, and its decoder over the KV pool.

encoder   features (frames, bands) -> states (frames / 8, hidden)
decoder   states -> the tokens of a window (`models.speech_to_text.window_program`)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import CohereAsrForConditionalGeneration

from models.base import Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.cohere_asr.decoder import CohereDecoder
from models.cohere_asr.graph import MAX_POSITIONS
from models.cohere_asr.settings import CohereSettings
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
) -> "CohereDecoder | CohereEncoder":
    """Load `encoder` or `decoder` of a checkpoint folder in Hugging Face format; `kwargs` are not used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node not in (ENCODER, NAME):
        raise BugError(f"cohere_asr has no node {node!r} with weights; it has {ENCODER!r} and {NAME!r}")
    settings = CohereSettings.read(checkpoint)
    model = load_half(
        CohereAsrForConditionalGeneration, checkpoint, node, torch.device(device), dtype, progress
    )
    if node == ENCODER:
        return CohereEncoder(model)
    return CohereDecoder(
        model,
        {PROGRAM_NAME: WriteText("cohere_asr", {settings.end})},
        heads=int(model.config.num_key_value_heads),
        positions=settings.positions,
        max_positions=_longest(settings),
    )


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence in cells.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    read_shards(checkpoint)
    return _longest(CohereSettings.read(checkpoint))


class CohereEncoder:
    """The encoder as a stateless node (`models.base.StatelessNode`).

    Windows are computed one by one: padding to the longest of a batch would change their last bits.
    """

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's features, (frames, bands), to `states`, (n, hidden).

        The last of the features' frames is padding.
        """
        return [StatelessResult(outputs={"states": self._encode(item.inputs[HEARD])}) for item in items]

    def _encode(self, features: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, len(features), dtype=torch.bool, device=self._model.device)
        mask[:, -1] = False
        found = self._model.model.encoder(
            features[None].to(self._model.device, self._model.dtype), attention_mask=mask
        )
        states: torch.Tensor = found.last_hidden_state[0][found.attention_mask[0].bool()]
        return states


def _longest(settings: CohereSettings) -> int:
    return max(MAX_POSITIONS, settings.positions + 512)
