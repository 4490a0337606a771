"""Loading of a decoder-only language model: from a checkpoint folder to a node of the KV engine.

Cheap checks come first: a damaged file, an unknown architecture or an unsupported layer is an error before
any weight is read.
"""

from pathlib import Path
from typing import Any

import torch

from models.base import Peers
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards, weights_digest
from models.transformers_lm.architecture import choose_dtype, config_of, max_positions_of, model_class_of
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
    """Load the decoder-only language model of a checkpoint folder in Hugging Face format.

    `name` is that of the node in the graph. `dtype` is `bfloat16`, `float16`, `float32` or `auto`: on a GPU
    the dtype of the checkpoint, or for quantised weights that of the others; on a CPU float32 up to
    `CPU_FLOAT32_BYTES` and bfloat16 beyond, and also bfloat16 from `CPU_BFLOAT16_BYTES` on if the weights are
    stored in it and the processor has instructions for it. `progress` is called for every tensor that is
    read. Of a tensor-parallel group, `peers`, only this member's part is loaded.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool, or cannot
            be shared by that many ranks.
    """
    on = torch.device(device)
    raw = read_json(checkpoint / "config.json")
    model_class = model_class_of(raw, checkpoint)
    config = config_of(model_class, raw, checkpoint)
    shards = read_shards(checkpoint)
    quantised = quantised_of(raw, shards, checkpoint)
    max_positions = max_positions_of(config, raw)
    layout = probe_layout(_part_of(model_class, peers, is_connected=False), config, max_positions)
    chosen = choose_dtype(dtype, on, quantised.as_floats(shards) if quantised is not None else shards)
    model = load_weights(
        _part_of(model_class, peers, is_connected=True), config, shards, on, chosen, progress, quantised
    )
    return DecoderLM(
        model,
        name=name,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest(shards),
    )


def examine_decoder(checkpoint: Path, *, members: int = 1) -> int:
    """Check a checkpoint for `members` ranks, by its `config.json` alone; return its longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: `load_decoder` would raise it too.
    """
    raw = read_json(checkpoint / "config.json")
    model_class = model_class_of(raw, checkpoint)
    config = config_of(model_class, raw, checkpoint)
    quantised_of(raw, (), checkpoint)
    max_positions = max_positions_of(config, raw)
    # All members' parts have the same shapes, so one is checked.
    part = _part_of(model_class, SilentPeers(0, members) if members > 1 else None, is_connected=False)
    probe_layout(part, config, max_positions)
    return max_positions


def _part_of(model_class: Any, peers: Peers | None, *, is_connected: bool) -> Any:
    """The class of this member's part; its sums over the group are real if `is_connected`."""
    if peers is None:
        return model_class
    return sharded(model_class, peers if is_connected else SilentPeers(peers.index, peers.size))
