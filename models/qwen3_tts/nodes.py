"""The torch nodes of Qwen3-TTS, each with its own files of the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from models.base import KVLayout
from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.qwen3_omni.code2wav import Code2Wav
from models.qwen3_tts.codec import CodecDecoder
from models.qwen3_tts.folder import CODEC_FOLDER, read_settings
from models.qwen3_tts.graph import CODEC, CODES, TALKER
from models.qwen3_tts.talker import Talker
from models.qwen3_tts.talker_model import TalkerModel, qwen3_config
from models.vision_language.halves import Checkpoint, load_half
from shared.errors import BugError

_TALKER: Final = "talker."
_DECODER: Final = "decoder."


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Talker | Code2Wav:
    """Load one node of a checkpoint folder as published; the codec computes in float32.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has no preset voices, or another codec.
    """
    settings = read_settings(checkpoint)
    if node not in (TALKER, CODEC):
        raise BugError(f"qwen3_tts has no node {node!r} with weights: expected one of {(TALKER, CODEC)}")
    is_codec = node == CODEC
    read = codec_of(checkpoint) if is_codec else talker_of(checkpoint)
    model = load_half(
        read.model_class,
        read,
        lambda tensor: True,
        device=torch.device(device),
        dtype="float32" if is_codec else dtype,
        progress=progress,
    )
    if is_codec:
        return Code2Wav(model, CODES.name, delay=0)
    config = read.config
    layout = KVLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    digest = weights_digest(read_shards(checkpoint))
    return Talker(model, pad=settings.tts_pad_token_id, layout=layout, weights_digest=digest)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence of the KV node.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    read_settings(checkpoint)
    if node == CODEC:
        codec_of(checkpoint)
    return int(talker_of(checkpoint).config.max_position_embeddings)


def talker_of(checkpoint: Path) -> Checkpoint:
    """The talker, up to its weights.

    Raises:
        CheckpointError: `config.json` is missing or malformed.
    """
    raw = _part(checkpoint / "config.json", "talker_config")
    try:
        config = qwen3_config(raw)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / 'config.json'}: talker_config: {error}") from error
    return Checkpoint(folder=checkpoint, raw=raw, model_class=TalkerModel, config=config, prefix=_TALKER)


def codec_of(checkpoint: Path) -> Checkpoint:
    """The codec's decoder, up to its weights.

    Raises:
        CheckpointError: its `config.json` is missing or malformed.
    """
    folder = checkpoint / CODEC_FOLDER
    raw = _part(folder / "config.json", "decoder_config")
    given = {"latent_dim": 1024, "codebook_dim": 512, **raw}
    theta = given.pop("rope_theta", 10_000)
    given.pop("model_type", None)
    try:
        rope = {"rope_type": "default", "rope_theta": theta}
        config = Qwen3OmniMoeCode2WavConfig(**given, rope_parameters=rope)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: decoder_config: {error}") from error
    return Checkpoint(folder=folder, raw=raw, model_class=CodecDecoder, config=config, prefix=_DECODER)


def _part(path: Path, name: str) -> dict[str, Any]:
    part = read_json(path).get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"{path}: expected an object as {name}, found {type(part).__name__}")
    return part
