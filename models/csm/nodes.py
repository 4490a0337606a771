"""The torch nodes of CSM, each with its own part of the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import CsmForConditionalGeneration

from models.base import KVLayout
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.csm.codec import CodecDecoder
from models.csm.graph import CODEC, CODES, LLM
from models.csm.speech_lm import SpeechLM
from models.vision_language.halves import Checkpoint, lacking, load_half
from shared.errors import BugError

_CODEC: Final = "codec_model"


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> SpeechLM | CodecDecoder:
    """Load one node of a checkpoint folder in Hugging Face format; the codec computes in float32.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    read = Checkpoint.read(checkpoint)
    if node not in (LLM, CODEC):
        raise BugError(f"csm has no node {node!r} with weights: expected one of {(LLM, CODEC)}")
    is_codec = node == CODEC
    model = load_half(
        _codec_class() if is_codec else _speech_class(),
        read,
        lambda tensor: tensor.startswith(f"{_CODEC}.") is is_codec,
        device=torch.device(device),
        dtype="float32" if is_codec else dtype,
        progress=progress,
    )
    if is_codec:
        return CodecDecoder(model.codec_model, CODES.name, end=read.config.codebook_eos_token_id)
    config = read.config
    layout = KVLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    return SpeechLM(model, layout=layout, weights_digest=weights_digest(read_shards(checkpoint)))


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence of the KV node.

    Raises:
        CheckpointError: `config.json` is missing, malformed or unsupported.
    """
    return int(Checkpoint.read(checkpoint).config.max_position_embeddings)


def _speech_class() -> Any:
    """The class without its codec."""
    half = lacking(CsmForConditionalGeneration, _CODEC)
    half._tied_weights_keys = CsmForConditionalGeneration._tied_weights_keys  # noqa: SLF001 - both remain
    return half


def _codec_class() -> Any:
    """The class without its language models."""
    return lacking(
        CsmForConditionalGeneration, "lm_head", "embed_text_tokens", "backbone_model", "depth_decoder"
    )
