"""The recipe of a canvas: the options of a request, and the published defaults of its model."""

from dataclasses import dataclass

import torch

from models.diffusion_text.canvas import CanvasRecipe, RulesOf
from models.diffusion_text.refinement import Rules
from models.diffusion_text.schedule import Schedule
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
from shared.errors import ClientError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """The sampler that a model was published with.

    Attributes:
        mask_id: the token of a place that is not filled in.
        is_dream: the logits at a token are those of the next one, and the default order is Dream's.
        block_length: of a request that names none; None: the whole canvas is one block.
        schedule: of the orders of LLaDA.
    """

    mask_id: int
    is_dream: bool
    block_length: int | None
    schedule: Schedule


def recipe_of(options: MaskedDiffusionOptions, max_tokens: int, model: ModelDefaults) -> CanvasRecipe:
    """Return the recipe of an answer with a canvas of `max_tokens`.

    Raises:
        ClientError: the options exclude one another, or the steps cannot be divided among the blocks.
    """
    remasking = remasking_of(options, is_dream=model.is_dream)
    _check(options, remasking)
    length = min(options.block_length or model.block_length or max_tokens, max_tokens)
    return CanvasRecipe(
        mask_id=model.mask_id,
        shifts=model.is_dream,
        block_length=length,
        draw=draw_of(remasking, options.alg_temp),
        rules_of=_rules(options, remasking, _steps(options, length, max_tokens), model.schedule),
        guidance_scale=options.guidance_scale,
        cache=options.cache,
    )


def _rules(
    options: MaskedDiffusionOptions, remasking: Remasking, steps: int | None, schedule: Schedule
) -> RulesOf:
    """The rules of a block with so many masks; `steps` are those of a whole block."""
    is_free = is_parallel(options)

    def quotas(masks: int, generator: torch.Generator) -> list[int]:
        if is_free and steps is None:
            return [1]
        if remasking == "origin":
            return origin_shares(masks, steps or masks, options.eps, generator)
        if remasking in OF_DREAM:
            return dream_shares(masks, steps or masks, options.eps)
        return schedule(masks, steps or masks)

    def rules(masks: int, generator: torch.Generator) -> Rules:
        return Rules(
            quotas=quotas(masks, generator),
            threshold=options.confidence_threshold if is_free else None,
            factor=options.factor if is_free else None,
            early_stop=options.early_stop,
        )

    return rules


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
