"""The torch nodes of BAGEL: the language model, the encoders and the decoder of images."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from models.bagel import vae
from models.bagel.autoencoder import latent_channels_of
from models.bagel.combine import CombineCfg
from models.bagel.folder import AE, EMA
from models.bagel.llm import BagelLM, examine_llm, llm_config, load_llm
from models.bagel.parts import bracket_rows
from models.bagel.vit import examine_vit, load_vit
from models.base import StatelessNode
from models.checkpoints.progress import Progress, silent

__all__ = ["examine", "load"]


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> BagelLM | StatelessNode:
    """Load a node of a checkpoint in the published layout (`models.bagel.folder`); it has no `kwargs`.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the language model cannot be served over a paged pool.
    """
    if node == "combine_cfg":
        return CombineCfg(vae.load_colors(checkpoint))
    if node == "vit_encoder":
        return load_vit(checkpoint, device=device, dtype=dtype, progress=progress)
    if node == "vae_encoder":
        return vae.load_encoder(checkpoint, device=device, dtype=dtype, progress=progress)
    if node == "vae_decoder":
        return vae.load_decoder(checkpoint, device=device, dtype=dtype, progress=progress)
    model = load_llm(checkpoint, node, device=device, dtype=dtype, progress=progress)
    if node == "LLM":  # the other branches of guidance show nothing
        model.colors = vae.load_colors(checkpoint)
    return model


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the language model's longest sequence.

    Of weight files the headers are checked. A folder without them is one of a machine that only plans.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    longest = examine_llm(checkpoint)
    examine_vit(checkpoint)
    if (checkpoint / EMA).exists():
        llm_config(checkpoint)
        bracket_rows(checkpoint)
    if (checkpoint / AE).exists():
        latent_channels_of(checkpoint)
    return longest
