"""Decoder-only language models: the torch face, which is one node (see `models.transformers_lm`)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import Peers, TokenStep
from models.checkpoints.progress import Progress, silent
from models.transformers_lm.loader import examine_decoder, load_decoder
from models.transformers_lm.node import DecoderLM
from shared.errors import BugError

__all__ = ["NODE", "DecoderLM", "TokenStep", "examine", "load"]

NODE: Final = "llm"
"""The node's name in the graph."""


def load(
    checkpoint: Path,
    node: str = NODE,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    peers: Peers | None = None,
) -> DecoderLM:
    """The node of a checkpoint folder in Hugging Face format.

    Args:
        checkpoint: the folder.
        node: which of the graph's nodes; one alone has weights.
        device: where the weights go.
        dtype: `bfloat16`, `float16`, `float32` or `auto` (see `load_decoder`).
        progress: told about every tensor that is read.
        kwargs: the deployment's `model_kwargs`; this family has none of its own.
        peers: who shares the node, where several do (see `load_decoder`).

    Raises:
        CheckpointError: something in the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool.
    """
    if node != NODE:
        raise BugError(f"decoder_lm has no node {node!r} with weights; it has {NODE!r}")
    return load_decoder(checkpoint, node, device=device, dtype=dtype, progress=progress, peers=peers)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """What `load` would refuse before it reads a weight (see `examine_decoder`).

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    return examine_decoder(checkpoint, members=members)
