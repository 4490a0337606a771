"""The node `llm` of masked diffusion models, with the token programs `canvas` and `apd`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.progress import Progress, silent
from models.diffusion_text import a2d
from models.diffusion_text.canvas import CanvasDriver, CanvasRecipe
from models.diffusion_text.mask_token import mask_id_of
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.refinement import Rules
from models.diffusion_text.schedule import Schedule, even, linear
from models.diffusion_text.verifier import apd_program, load_verifier
from models.masked_diffusion import dream, llada
from models.masked_diffusion.graph import APD, BLOCK_LENGTH, CANVAS
from models.masked_diffusion.options import MaskedDiffusionOptions, Remasking
from models.masked_diffusion.remasking import (
    OF_DREAM,
    OF_PROBABILITY,
    draw_of,
    dream_shares,
    is_parallel,
    origin_shares,
    remasking_of,
)
from models.programs import TokenDriver, TokenProgram, TokenRequest
from models.transformers_lm.loader import examine_decoder, load_decoder
from models.transformers_lm.renames import Published
from shared.errors import BugError, ClientError

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
    mask_id, is_dream = mask_id_of(checkpoint), model_type == dream.MODEL_TYPE
    return {
        CANVAS: partial(
            _start_canvas,
            mask_id=mask_id,
            is_dream=is_dream,
            block_length=_configured(kwargs) or (LLADA_BLOCK if model_type == llada.MODEL_TYPE else None),
            schedule=even if model_type == llada.MODEL_TYPE else linear,
        ),
        APD: apd_program(mask_id=mask_id, shifts=is_dream),
    }


def _configured(kwargs: Mapping[str, Any]) -> int | None:
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


def _start_canvas(
    node: Any,
    request: TokenRequest,
    *,
    mask_id: int,
    is_dream: bool,
    block_length: int | None,
    schedule: Schedule,
) -> TokenDriver:
    options = msgspec.convert(request.options, MaskedDiffusionOptions)
    remasking = remasking_of(options, is_dream=is_dream)
    _check(options, remasking)
    length = min(options.block_length or block_length or request.max_tokens, request.max_tokens)
    steps = _steps(options, length, request.max_tokens)
    is_free = is_parallel(options)

    def quotas_of(masks: int, generator: torch.Generator) -> list[int]:
        if is_free and steps is None:
            return [1]
        if remasking == "origin":
            return origin_shares(masks, steps or masks, options.eps, generator)
        if remasking in OF_DREAM:
            return dream_shares(masks, steps or masks, options.eps)
        return schedule(masks, steps or masks)

    def rules_of(masks: int, generator: torch.Generator) -> Rules:
        return Rules(
            quotas=quotas_of(masks, generator),
            threshold=options.confidence_threshold if is_free else None,
            factor=options.factor if is_free else None,
            early_stop=options.early_stop,
        )

    recipe = CanvasRecipe(
        mask_id=mask_id,
        shifts=is_dream,
        block_length=length,
        draw=draw_of(remasking, options.alg_temp),
        rules_of=rules_of,
        guidance_scale=options.guidance_scale,
        cache=options.cache,
    )
    return CanvasDriver(request, recipe, device=node.device)


def _steps(options: MaskedDiffusionOptions, block_length: int, max_tokens: int) -> int | None:
    """The steps of each block; None if the request names none.

    Raises:
        ClientError: the blocks cannot share them.
    """
    blocks = -(-max_tokens // block_length)
    if options.steps is None:
        return None
    if options.steps % blocks:
        raise ClientError(
            f"steps: expected a multiple of the {blocks} blocks of an answer (max_tokens {max_tokens} in "
            f"blocks of {block_length}), found {options.steps}",
            code="invalid_value",
        )
    return options.steps // blocks


def _check(options: MaskedDiffusionOptions, remasking: Remasking) -> None:
    """Check options that exclude one another.

    Raises:
        ClientError: some do.
    """
    if is_parallel(options) and remasking not in OF_PROBABILITY:
        raise ClientError(
            f"remasking {remasking!r} orders by something else than a probability, so confidence_threshold "
            f"and factor have no meaning: expected {' or '.join(sorted(OF_PROBABILITY))}, or neither of them",
            code="invalid_value",
        )
    if options.confidence_threshold is not None and options.factor is not None and options.parallel_decoding:
        raise ClientError(
            "confidence_threshold and factor: expected one of them; each decides how many tokens a step "
            "fills in",
            code="invalid_value",
        )
    if options.alg_temp and remasking not in OF_DREAM - {"origin"}:
        raise ClientError(
            f"alg_temp: expected remasking maskgit_plus, topk_margin or entropy, found {remasking!r}",
            code="invalid_value",
        )
