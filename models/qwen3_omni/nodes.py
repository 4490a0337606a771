"""The torch nodes of Qwen3-Omni, each with its own part of the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import KVLayout, Peers
from models.checkpoints.files import UnsupportedArchitectureError
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.qwen3_omni.checkpoint import OmniCheckpoint
from models.qwen3_omni.code2wav import Code2Wav
from models.qwen3_omni.encoders import AudioEncoder, OmniVisionEncoder
from models.qwen3_omni.graph import CODE2WAV, CODES, SOUND, TALKER, THINKER, VISION
from models.qwen3_omni.talker import Talker
from models.qwen3_omni.thinker import Thinker
from models.vision_language.decoder import decoder_of, examined
from models.vision_language.halves import is_of_tower, load_half, tower_half
from shared.errors import BugError

TOWERS: Final = {VISION: "visual", SOUND: "audio_tower"}
"""The members of the thinker that the encoders are."""

Loaded = Thinker | Talker | OmniVisionEncoder | AudioEncoder | Code2Wav


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    peers: Peers | None = None,
) -> Loaded:
    """Load one node of a checkpoint folder in Hugging Face format; the codec computes in float32.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the node cannot be served, or not by that many ranks.
    """
    read, on = OmniCheckpoint.read(checkpoint), torch.device(device)
    match node:
        case "Thinker":
            return _thinker(read, device=on, dtype=dtype, progress=progress, peers=peers)
        case "Talker":
            _check_alone(1 if peers is None else peers.size)
            return _talker(read, device=on, dtype=dtype, progress=progress)
        case "Code2Wav":
            return Code2Wav(read.load_code2wav(device=on, progress=progress), CODES.name)
        case "vision_encoder" | "audio_encoder":
            return _encoder(read, node, device=on, dtype=dtype, progress=progress)
        case _:
            known = (THINKER, TALKER, CODE2WAV, VISION, SOUND)
            raise BugError(f"qwen3_omni has no node {node!r} with weights: expected one of {known}")


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence of a KV node.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    read = OmniCheckpoint.read(checkpoint)
    if node != TALKER:
        return examined(read.thinker, members=members)
    _check_alone(members)
    return int(read.config.talker_config.text_config.max_position_embeddings)


def _thinker(
    read: OmniCheckpoint, *, device: torch.device, dtype: str, progress: Progress, peers: Peers | None
) -> Thinker:
    found = decoder_of(
        read.thinker,
        THINKER,
        device=device,
        dtype=dtype,
        progress=progress,
        peers=peers,
        node_class=Thinker,
    )
    assert isinstance(found, Thinker)
    talker = read.config.talker_config
    found.state_layer = talker.accept_hidden_layer if talker is not None else 0
    return found


def _talker(read: OmniCheckpoint, *, device: torch.device, dtype: str, progress: Progress) -> Talker:
    config = read.config
    text = config.talker_config.text_config
    marks = [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]
    return Talker(
        read.load_talker(device=device, dtype=dtype, progress=progress),
        read.embeddings(marks),
        name=TALKER,
        layout=KVLayout(
            layers=text.num_hidden_layers, kv_heads=text.num_key_value_heads, head_dim=text.head_dim
        ),
        weights_digest=weights_digest(read_shards(read.folder)),
    )


def _encoder(
    read: OmniCheckpoint, node: str, *, device: torch.device, dtype: str, progress: Progress
) -> OmniVisionEncoder | AudioEncoder:
    thinker = read.thinker
    others = [tower for one, tower in TOWERS.items() if one != node]
    half = tower_half(thinker.model_class, *others)
    of_tower = is_of_tower(thinker.model_class, thinker.config)

    def keep(tensor: str) -> bool:
        return of_tower(tensor) and not set(others) & set(tensor.split("."))

    model = load_half(half, thinker, keep, device=device, dtype=dtype, progress=progress)
    if node == VISION:
        return OmniVisionEncoder(model)
    deeper = len(thinker.config.vision_config.deepstack_visual_indexes)
    return AudioEncoder(model, width=thinker.config.text_config.hidden_size * (1 + deeper))


def _check_alone(members: int) -> None:
    if members > 1:
        raise UnsupportedArchitectureError(
            f"{TALKER} is not shared by {members} ranks: it is small, and its code predictor would wait for "
            "the others 15 times in each frame; expected tp_size 1 for it"
        )
