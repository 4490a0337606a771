"""The node `llm` of masked diffusion models, with the token programs `canvas` and `apd`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress, silent
from models.diffusion_text import a2d
from models.diffusion_text.apd_options import APD
from models.diffusion_text.apd_program import apd_program
from models.diffusion_text.canvas import CanvasDriver
from models.diffusion_text.mask_token import mask_id_of
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.schedule import even, linear
from models.diffusion_text.verifier import load_verifier
from models.masked_diffusion import dream, llada
from models.masked_diffusion.graph import BLOCK_LENGTH, CANVAS
from models.masked_diffusion.options import MaskedDiffusionOptions
from models.masked_diffusion.recipe import ModelDefaults, recipe_of
from models.programs import TokenDriver, TokenProgram, TokenRequest
from models.transformers_lm.loader import examine_decoder, load_decoder
from models.transformers_lm.renames import Published
from shared.errors import BugError

NODE: Final = "llm"
LLADA_BLOCK: Final = 32
"""The tokens of a block of LLaDA whose request names none, as in the published evaluations."""


def load(
    checkpoint: Path,
    node: str = NODE,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> DiffusionLM:
    """Load the node of a checkpoint folder, and the verifier that `kwargs` names (`verifier`).

    `kwargs` may also have `block_length`, for requests that name none.

    Raises:
        CheckpointError: a file of a folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has a feature that is not computed.
    """
    if node != NODE:
        raise BugError(f"masked_diffusion has no node {node!r} with weights; it has {NODE!r}")
    towers = load_verifier(checkpoint, kwargs, device=device, dtype=dtype, progress=progress)
    decoder = load_decoder(
        checkpoint, node, device=device, dtype=dtype, progress=progress, published=_published(checkpoint)
    )
    return DiffusionLM(decoder, programs_of(checkpoint, kwargs), towers)


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence."""
    mask_id_of(checkpoint)
    return examine_decoder(checkpoint, members=members, published=_published(checkpoint))


def programs_of(
    checkpoint: Path, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, TokenProgram]:
    """Return the token programs for the model of a checkpoint, by name.

    Raises:
        CheckpointError: a file is malformed, or names no mask token; or `kwargs` are invalid.
    """
    model_type = read_json(checkpoint / "config.json").get("model_type")
    is_llada = model_type == llada.MODEL_TYPE
    model = ModelDefaults(
        mask_id=mask_id_of(checkpoint),
        is_dream=model_type == dream.MODEL_TYPE,
        block_length=_configured(kwargs) or (LLADA_BLOCK if is_llada else None),
        schedule=even if is_llada else linear,
    )
    return {CANVAS: _canvas(model), APD: apd_program(mask_id=model.mask_id, shifts=model.is_dream)}


def _configured(kwargs: Mapping[str, Any]) -> int | None:
    """The tokens of a block that the deployment names."""
    found = kwargs.get(BLOCK_LENGTH)
    if found is not None and (not isinstance(found, int) or found < 1):
        raise CheckpointError(
            f"model_kwargs.{BLOCK_LENGTH}: expected the tokens of a block, a number from 1, found {found!r}"
        )
    return found


def _published(checkpoint: Path) -> Published | None:
    """The class of transformers for a checkpoint; None if it is that of its `model_type`."""
    raw = read_json(checkpoint / "config.json")
    match raw.get("model_type"):
        case llada.MODEL_TYPE:
            return llada.published(raw, checkpoint)
        case dream.MODEL_TYPE:
            return dream.published(raw, checkpoint)
        case _:
            return a2d.published(raw, checkpoint)


def _canvas(model: ModelDefaults) -> TokenProgram:
    def start(node: Any, request: TokenRequest) -> TokenDriver:
        options = msgspec.convert(request.options, MaskedDiffusionOptions)
        return CanvasDriver(request, recipe_of(options, request.max_tokens, model), device=node.device)

    return start
