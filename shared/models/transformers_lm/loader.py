"""A checkpoint folder in, a node of the KV-cache engine out.

What is cheap to know comes first: a damaged file, an unknown architecture, a layer that cannot be served
are each one clear line before a weight is read.
"""

from pathlib import Path

import torch

from shared.models.checkpoint import UnsupportedArchitectureError, read_json
from shared.models.progress import Progress, silent
from shared.models.transformers_lm.architecture import (
    choose_dtype,
    config_of,
    max_positions_of,
    model_class_of,
)
from shared.models.transformers_lm.node import DecoderLM
from shared.models.transformers_lm.probe import probe_layout
from shared.models.transformers_lm.tensors import load_weights
from shared.models.weights import read_shards, weights_digest


def load_decoder(
    checkpoint: Path,
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
) -> DecoderLM:
    """The decoder-only language model of a checkpoint folder in Hugging Face format.

    Args:
        checkpoint: the folder.
        name: what the graph calls the node.
        device: where the weights go.
        dtype: `bfloat16`, `float16`, `float32` or `auto`: on a GPU what the checkpoint is stored in; on
            a CPU float32 as long as that takes no more than `CPU_FLOAT32_BYTES`, beyond it bfloat16.
        progress: told about every tensor that is read.

    Raises:
        CheckpointError: something in the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool.
    """
    on = torch.device(device)
    raw = read_json(checkpoint / "config.json")
    if "quantization_config" in raw:
        raise UnsupportedArchitectureError(
            f"{checkpoint}: quantised checkpoints are not supported; expected float weights"
        )
    model_class = model_class_of(raw, checkpoint)
    config = config_of(model_class, raw, checkpoint)
    shards = read_shards(checkpoint)
    max_positions = max_positions_of(config, raw)
    layout = probe_layout(model_class, config, max_positions)
    chosen = choose_dtype(dtype, on, shards)
    model = load_weights(model_class, config, shards, on, chosen, progress)
    return DecoderLM(
        model,
        name=name,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest(shards),
    )
