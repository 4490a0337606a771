"""The torch nodes of Higgs Audio v2: transformers' language model over the KV pool, and its codec."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import HiggsAudioV2ForConditionalGeneration, HiggsAudioV2TokenizerConfig

from models.base import KVLayout
from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.dia.codec import ChunkDecoder, frames_around
from models.dia.graph import SPEAK
from models.higgs_audio_v2.codec import DECODING, HiggsAudioV2TokenizerModel
from models.higgs_audio_v2.graph import CODEC, LLM, SAMPLE_RATE
from models.higgs_audio_v2.language_model import HiggsAudioLM
from models.higgs_audio_v2.settings import HiggsAudioSettings, Repeats
from models.higgs_audio_v2.speaker import Speak
from models.higgs_audio_v2.weight_files import find_codec
from models.transformers_lm.architecture import config_of
from models.transformers_lm.tensors import load_weights
from models.vision_language.halves import Checkpoint, load_half
from shared.errors import BugError

_TEXT_HEAD: Final = "text_lm_head"
"""A part of the name of the head for text, which speech does not need."""


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> HiggsAudioLM | ChunkDecoder:
    """Load one node of a checkpoint folder; the codec's folder may be in it or elsewhere.

    The codec computes in float32; `kwargs["audio_tokenizer"]` is its folder
    (`models.higgs_audio_v2.weight_files`).

    Raises:
        CheckpointError: a file of a folder is missing, damaged or unsupported.
    """
    if node not in (LLM, CODEC):
        raise BugError(f"higgs_audio_v2 has no node {node!r} with weights: expected one of {(LLM, CODEC)}")
    folder = find_codec(checkpoint, kwargs)
    config = _codec_config(folder)
    if node == CODEC:
        return _codec(folder, config, torch.device(device), progress)
    settings, read = HiggsAudioSettings.read(checkpoint), Checkpoint.read(checkpoint)
    if settings.num_codebooks != config.num_quantizers:
        raise CheckpointError(
            f"{folder}: expected a codec with {settings.num_codebooks} codebooks, found "
            f"{config.num_quantizers}; set the folder of the right one in model_kwargs.audio_tokenizer"
        )
    model = load_half(
        HiggsAudioV2ForConditionalGeneration,
        read,
        lambda tensor: _TEXT_HEAD not in tensor,
        device=torch.device(device),
        dtype=dtype,
        progress=progress,
    )
    around = frames_around(config.acoustic_model_config.upsampling_ratios)
    speak = Speak(settings, Repeats.read(checkpoint), around=around)
    layout = KVLayout(
        layers=settings.num_hidden_layers, kv_heads=settings.num_key_value_heads, head_dim=settings.head_dim
    )
    digest = weights_digest(read_shards(checkpoint))
    return HiggsAudioLM(model, {SPEAK: speak}, layout=layout, weights_digest=digest)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence of the KV node.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    Checkpoint.read(checkpoint)
    read_shards(checkpoint)
    return HiggsAudioSettings.read(checkpoint).max_position_embeddings


def _codec(folder: Path, config: Any, device: torch.device, progress: Progress) -> ChunkDecoder:
    shards = [
        replace(shard, tensors={name: one for name, one in shard.tensors.items() if DECODING.match(name)})
        for shard in read_shards(folder)
    ]
    model = load_weights(HiggsAudioV2TokenizerModel, config, shards, device, torch.float32, progress)
    hop = math.prod(config.acoustic_model_config.upsampling_ratios)
    return ChunkDecoder(model, hop=hop, device=device)


def _codec_config(folder: Path) -> Any:
    """The codec's configuration.

    Raises:
        CheckpointError: it is missing or malformed, or it is of another codec.
    """
    config = config_of(HiggsAudioV2TokenizerModel, read_json(folder / "config.json"), folder)
    found = config.model_type, config.sample_rate
    if found != (HiggsAudioV2TokenizerConfig.model_type, SAMPLE_RATE):
        raise CheckpointError(
            f"{folder}: expected a higgs_audio_v2_tokenizer of {SAMPLE_RATE} Hz, found {found[0]} of "
            f"{found[1]} Hz"
        )
    return config
