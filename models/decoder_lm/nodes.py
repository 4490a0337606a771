"""The node `llm` of decoder-only language models (see `models.transformers_lm`)."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import Peers, TokenStep
from models.checkpoints.claims import CheckpointInfo
from models.checkpoints.progress import Progress, silent
from models.decoder_lm.multimodal import LANGUAGE_MODELS
from models.transformers_lm.loader import examine_decoder, load_decoder
from models.transformers_lm.multimodal import language_model_of
from models.transformers_lm.node import DecoderLM
from models.transformers_lm.renames import Published
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
    leaves_weights: bool = False,
) -> DecoderLM:
    """Load the node of a checkpoint folder in Hugging Face format; see `load_decoder`.

    Only `llm` has weights. `kwargs` is the deployment's `model_kwargs`; this family defines none.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool.
    """
    if node != NODE:
        raise BugError(f"decoder_lm has no node {node!r} with weights; it has {NODE!r}")
    return load_decoder(
        checkpoint,
        node,
        device=device,
        dtype=dtype,
        progress=progress,
        peers=peers,
        published=_published(checkpoint),
        leaves_weights=leaves_weights,
    )


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    return examine_decoder(checkpoint, members=members, published=_published(checkpoint))


def _published(checkpoint: Path) -> Published | None:
    """The language model of a multimodal checkpoint; None for a language model."""
    info = CheckpointInfo.read(checkpoint)
    name = LANGUAGE_MODELS.get(info.architecture)
    return None if name is None else language_model_of(info.config, checkpoint, name)
