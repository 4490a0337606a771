"""A checkpoint folder in, a node of the KV-cache engine out.

What is cheap to know comes first: a damaged file, an unknown architecture, a layer that cannot be served
are each one clear line before a weight is read.
"""

from pathlib import Path
from typing import Any

import torch

from models.base import Peers
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.transformers_lm.architecture import (
    choose_dtype,
    config_of,
    max_positions_of,
    model_class_of,
)
from models.transformers_lm.node import DecoderLM
from models.transformers_lm.probe import probe_layout
from models.transformers_lm.quantised import quantised_of
from models.transformers_lm.sharding import SilentPeers, sharded
from models.transformers_lm.tensors import load_weights


def load_decoder(
    checkpoint: Path,
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    peers: Peers | None = None,
) -> DecoderLM:
    """The decoder-only language model of a checkpoint folder in Hugging Face format.

    Args:
        checkpoint: the folder.
        name: what the graph calls the node.
        device: where the weights go.
        dtype: `bfloat16`, `float16`, `float32` or `auto`: on a GPU what the checkpoint is stored in, or of a
            quantised one what is not; on a CPU float32 as long as that takes no more than
            `CPU_FLOAT32_BYTES`, beyond it bfloat16; and bfloat16 from `CPU_BFLOAT16_BYTES` on where the
            weights are stored in it and the processor multiplies it.
        progress: told about every tensor that is read.
        peers: who shares the model; this member's part is loaded then.

    Raises:
        CheckpointError: something in the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool, or cannot
            be shared by so many.
    """
    on = torch.device(device)
    raw = read_json(checkpoint / "config.json")
    model_class = model_class_of(raw, checkpoint)
    config = config_of(model_class, raw, checkpoint)
    shards = read_shards(checkpoint)
    quantised = quantised_of(raw, shards, checkpoint)
    max_positions = max_positions_of(config, raw)
    layout = probe_layout(_part_of(model_class, peers, heard=False), config, max_positions)
    chosen = choose_dtype(dtype, on, quantised.as_floats(shards) if quantised is not None else shards)
    model = load_weights(
        _part_of(model_class, peers, heard=True), config, shards, on, chosen, progress, quantised
    )
    return DecoderLM(
        model,
        name=name,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest(shards),
    )


def examine_decoder(checkpoint: Path, *, members: int = 1) -> int:
    """What `load_decoder` would refuse for what `config.json` says; no file of weights need be there.

    Args:
        checkpoint: the folder.
        members: how many are to share the model.

    Returns:
        How many tokens a text may have.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load_decoder` does.
    """
    raw = read_json(checkpoint / "config.json")
    model_class = model_class_of(raw, checkpoint)
    config = config_of(model_class, raw, checkpoint)
    quantised_of(raw, (), checkpoint)
    max_positions = max_positions_of(config, raw)
    # Members' parts are of one shape, so one is looked at.
    part = _part_of(model_class, SilentPeers(0, members) if members > 1 else None, heard=False)
    probe_layout(part, config, max_positions)
    return max_positions


def _part_of(model_class: Any, peers: Peers | None, *, heard: bool) -> Any:
    """The class of this member's part, with sums over all of them where that is to be heard."""
    if peers is None:
        return model_class
    return sharded(model_class, peers if heard else SilentPeers(peers.index, peers.size))
