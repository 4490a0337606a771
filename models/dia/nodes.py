"""The torch nodes of Dia: transformers' encoder, its decoder over the KV pool, and DAC."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import DacModel, DiaForConditionalGeneration

from models.base import Item, StatelessResult
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.dia.codec import Dac, frames_around
from models.dia.decoder import DiaDecoder
from models.dia.graph import CODEC, DECODER, ENCODER, MAX_POSITIONS, SPEAK
from models.dia.settings import DiaSettings
from models.dia.speaker import Speak
from models.dia.weight_files import find_dac
from models.transformers_lm.architecture import config_of
from models.transformers_lm.tensors import load_weights
from models.vision_language.halves import Checkpoint, lacking, load_half
from shared.errors import BugError


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "DiaDecoder | DiaEncoder | Dac":
    """Load one node of a checkpoint folder in Hugging Face format; DAC's folder may be in it or elsewhere.

    DAC computes in float32; `kwargs["dac"]` is the folder of its checkpoint (`models.dia.weight_files`).

    Raises:
        CheckpointError: a file of a folder is missing, damaged or unsupported.
    """
    if node not in (ENCODER, DECODER, CODEC):
        raise BugError(f"dia has no node {node!r} with weights: expected one of {(ENCODER, DECODER, CODEC)}")
    on = torch.device(device)
    if node == CODEC:
        folder = find_dac(checkpoint, kwargs)
        config = config_of(DacModel, read_json(folder / "config.json"), folder)
        return Dac(load_weights(DacModel, config, read_shards(folder), on, torch.float32, progress))
    settings, is_encoder = DiaSettings.read(checkpoint), node == ENCODER
    model = load_half(
        _encoder_class() if is_encoder else _decoder_class(),
        Checkpoint.read(checkpoint),
        lambda tensor: (".encoder." in f".{tensor}") is is_encoder,
        device=on,
        dtype=dtype,
        progress=progress,
    )
    if is_encoder:
        return DiaEncoder(model)
    around = frames_around(read_json(find_dac(checkpoint, kwargs) / "config.json")["upsampling_ratios"])
    return DiaDecoder(model, {SPEAK: Speak(settings, around=around)}, max_positions=_longest(settings))


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence in cells.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    Checkpoint.read(checkpoint)
    read_shards(checkpoint)
    return _longest(DiaSettings.read(checkpoint))


class DiaEncoder:
    """The encoder as a stateless node (`models.base.StatelessNode`). Texts are computed one by one."""

    max_batch: Final = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `token_ids`, (bytes,), to `states`, (contexts, bytes, width).

        The second context is guidance's: as many zeros as the text has bytes.
        """
        return [StatelessResult(outputs={"states": self._encode(item)}) for item in items]

    @torch.inference_mode()
    def _encode(self, item: Item) -> torch.Tensor:
        ids = item.inputs["token_ids"].long().to(self._model.device)
        is_guided = item.args["guidance_scale"] > 1
        texts = torch.stack([ids, torch.zeros_like(ids)]) if is_guided else ids[None]
        states: torch.Tensor = self._model.model.encoder(texts).last_hidden_state
        return states


def _longest(settings: DiaSettings) -> int:
    return max(settings.longest, MAX_POSITIONS)


def _encoder_class() -> Any:
    """The class without its decoder."""
    return lacking(DiaForConditionalGeneration, "model.decoder", "logits_dense")


def _decoder_class() -> Any:
    """The class without its encoder."""
    return lacking(DiaForConditionalGeneration, "model.encoder")
