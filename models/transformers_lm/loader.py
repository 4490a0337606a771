"""Loading of a decoder-only language model: from a checkpoint folder to a node of the KV engine.

Cheap checks come first: a damaged file, an unknown architecture or an unsupported layer is an error before
any weight is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.base import Peers
from models.checkpoints.files import UnsupportedArchitectureError, read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.transformers_lm.architecture import choose_dtype, config_of, max_positions_of, model_class_of
from models.transformers_lm.attention_forms import attach_forms
from models.transformers_lm.left_weights import (
    CLASSES,
    CLASSES_ON_GPU,
    Floats,
    Stored,
    as_floats,
    floats_of_experts,
    floats_of_linears,
    is_packed,
    of_experts,
)
from models.transformers_lm.longrope import rotary_change_of
from models.transformers_lm.node import DecoderLM
from models.transformers_lm.probe import probe_layout
from models.transformers_lm.quantised import Quantised, quantised_of
from models.transformers_lm.recurrent import attach_recurrences
from models.transformers_lm.renames import Published, Renamed
from models.transformers_lm.sharding import SilentPeers, sharded
from models.transformers_lm.tensors import load_weights, slices_of


def load_decoder(
    checkpoint: Path,
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    peers: Peers | None = None,
    published: Published | None = None,
    leaves_weights: bool = False,
) -> DecoderLM:
    """Load the decoder-only language model of a checkpoint folder in Hugging Face format.

    `name` is that of the node in the graph. `dtype` is `bfloat16`, `float16`, `float32` or `auto`: on a GPU
    the dtype of the checkpoint, or for quantised weights that of the others; on a CPU float32 up to
    `CPU_FLOAT32_BYTES` and bfloat16 beyond, and also bfloat16 from `CPU_BFLOAT16_BYTES` on if the weights are
    stored in it and the processor has instructions for it. `progress` is called for every tensor that is
    read. Of a tensor-parallel group, `peers`, only this member's part is loaded. `published` describes a
    checkpoint whose class transformers has under another name. With `leaves_weights`, those that the
    kernels read themselves are not read until `DecoderLM.fill`, of a whole model: on a GPU what is stored as
    numbers of few bits, or of a checkpoint of floats all that the kernels pack.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool, or cannot
            be shared by that many ranks.
    """
    on = torch.device(device)
    raw = read_json(checkpoint / "config.json")
    model_class, config = _class_and_config(raw, checkpoint, published)
    shards = read_shards(checkpoint)
    quantised = quantised_of(raw, shards, checkpoint)
    renamed = None if published is None else Renamed.of(shards, published.rule)
    max_positions = max_positions_of(config, raw)
    layout = probe_layout(_part_of(model_class, peers, is_connected=False), config, max_positions)
    chosen = choose_dtype(dtype, on, quantised.as_floats(shards) if quantised is not None else shards)
    part = _part_of(model_class, peers, is_connected=True)
    stored: Stored = {}
    floats: Floats = {}
    left: set[str] = set()
    # Published models have other names of tensors in the files.
    classes = CLASSES_ON_GPU if _has_gpu_kernels(on) else CLASSES if on.type == "cpu" else frozenset()
    if peers is None and published is None and model_class.__name__ in classes:
        stored, floats = _readers(slices_of(shards), quantised, config, chosen, on)
    if leaves_weights:
        left = {*stored, *floats}
    model = load_weights(part, config, shards, on, chosen, progress, quantised, renamed, left)
    attach_forms(model)
    attach_recurrences(model)
    return DecoderLM(
        model,
        name=name,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest(shards),
        rotary_change=rotary_change_of(model_class.__name__, config),
        stored_weights=stored,
        left_floats=floats if left else {},
        is_filled=not left,
    )


def _has_gpu_kernels(on: torch.device) -> bool:
    return on.type == "cuda"


def _readers(
    slices: Mapping[str, Any], quantised: Quantised | None, config: Any, dtype: torch.dtype, on: torch.device
) -> tuple[Stored, Floats]:
    """Return readers of weights that our kernels pack: numbers of few bits as stored, and floats.

    On a CPU the floats are those of all experts; on a GPU those of the same weights, and of all that are
    packed where none has few bits.
    """
    is_on_gpu = _has_gpu_kernels(on)
    if quantised is None:
        if is_on_gpu:
            return {}, floats_of_linears(slices, dtype, config, on)
        return {}, floats_of_experts(slices, dtype, config)
    grouped = quantised.grouped(slices, with_floats=is_on_gpu)
    stored = {name: read for name, read in grouped.items() if is_packed(name, config)}
    if is_on_gpu:
        return stored, as_floats(stored, dtype, on)
    floats = floats_of_experts(quantised.slices(slices), dtype, config)
    return stored, as_floats(of_experts(stored), dtype) | floats


def examine_decoder(checkpoint: Path, *, members: int = 1, published: Published | None = None) -> int:
    """Check a checkpoint for `members` ranks, by its `config.json` alone; return its longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: `load_decoder` would raise it too.
    """
    raw = read_json(checkpoint / "config.json")
    model_class, config = _class_and_config(raw, checkpoint, published)
    quantised_of(raw, (), checkpoint)
    max_positions = max_positions_of(config, raw)
    # All members' parts have the same shapes, so one is checked.
    part = _part_of(model_class, SilentPeers(0, members) if members > 1 else None, is_connected=False)
    probe_layout(part, config, max_positions)
    return max_positions


def _class_and_config(
    raw: Mapping[str, Any], checkpoint: Path, published: Published | None
) -> tuple[Any, Any]:
    """The class of transformers that computes a checkpoint, and its config."""
    if published is None:
        model_class = model_class_of(raw, checkpoint)
        return model_class, config_of(model_class, raw, checkpoint)
    if raw.get("quantization_config") is not None:
        raise UnsupportedArchitectureError(
            f"{checkpoint}: quantised weights of {raw.get('model_type')!r} are not served: expected the "
            "model's float weights"
        )
    return published.model_class, published.config


def _part_of(model_class: Any, peers: Peers | None, *, is_connected: bool) -> Any:
    """The class of this member's part; its sums over the group are real if `is_connected`."""
    if peers is None:
        return model_class
    return sharded(model_class, peers if is_connected else SilentPeers(peers.index, peers.size))
