"""The node `llm` of block diffusion models, with the token program `blocks`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch

from models.block_diffusion import llada2
from models.block_diffusion.driver import BlockDriver, Recipe
from models.block_diffusion.graph import PROGRAM
from models.block_diffusion.options import BlockDiffusionOptions
from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress, silent
from models.diffusion_text import a2d
from models.diffusion_text.candidates import draw_filtered, draw_plain
from models.diffusion_text.mask_token import mask_id_of
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.schedule import even, linear
from models.programs import TokenDriver, TokenProgram, TokenRequest
from models.transformers_lm.loader import examine_decoder, load_decoder
from models.transformers_lm.renames import Published
from shared.errors import BugError, ClientError

NODE: Final = "llm"
_BLOCK_LENGTH: Final = 32
"""The tokens of a block, as all published models have them."""
_LLADA2_THRESHOLD: Final = 0.95


def load(
    checkpoint: Path,
    node: str = NODE,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> DiffusionLM:
    """Load the node of a checkpoint folder. `kwargs` is the deployment's `model_kwargs`; none is used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has a feature that is not computed.
    """
    if node != NODE:
        raise BugError(f"block_diffusion has no node {node!r} with weights; it has {NODE!r}")
    decoder = load_decoder(
        checkpoint, node, device=device, dtype=dtype, progress=progress, published=_published(checkpoint)
    )
    return DiffusionLM(decoder, {PROGRAM: _program(recipe_of(checkpoint))})


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence."""
    recipe_of(checkpoint)
    return examine_decoder(checkpoint, members=members, published=_published(checkpoint))


def recipe_of(checkpoint: Path) -> Recipe:
    """Return the sampler that the model of a checkpoint was published with.

    Raises:
        CheckpointError: a file is malformed, or names no mask token.
    """
    config = read_json(checkpoint / "config.json")
    is_llada2 = config.get("model_type") == llada2.MODEL_TYPE
    length = config.get("block_size") or config.get("block_length") or _BLOCK_LENGTH
    return Recipe(
        mask_id=mask_id_of(checkpoint),
        block_length=int(length),
        begins_at_prompt=not is_llada2,
        draw=draw_filtered if is_llada2 else draw_plain,
        schedule=even if is_llada2 else linear,
        threshold=_LLADA2_THRESHOLD if is_llada2 else None,
    )


def _program(recipe: Recipe) -> TokenProgram:
    def start(node: Any, request: TokenRequest) -> TokenDriver:
        options = msgspec.convert(request.options, BlockDiffusionOptions)
        _check(options)
        return BlockDriver(request, options, recipe, device=node.device, max_positions=node.max_positions)

    return start


def _check(options: BlockDiffusionOptions) -> None:
    """Check options that exclude one another.

    Raises:
        ClientError: some do.
    """
    is_given = options.confidence_threshold is not None or options.editing_threshold is not None
    if options.remasking == "random" and is_given:
        raise ClientError(
            "remasking 'random' does not look at probabilities, so confidence_threshold and "
            "editing_threshold have no meaning: expected low_confidence, or neither of them",
            code="invalid_value",
        )


def _published(checkpoint: Path) -> Published | None:
    """The class of transformers for a checkpoint; None if it is that of its `model_type`."""
    raw = read_json(checkpoint / "config.json")
    if raw.get("model_type") == llada2.MODEL_TYPE:
        return llada2.published(raw, checkpoint)
    return a2d.published(raw, checkpoint)
