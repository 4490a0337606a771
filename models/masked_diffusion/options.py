"""The request parameters of masked diffusion models. No torch."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from models.diffusion_text.apd_options import ApdOptions

Remasking: TypeAlias = Literal["low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy"]


class MaskedDiffusionOptions(ApdOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of an answer that is filled in, besides those of APD. The canvas has `max_tokens` tokens.

    Attributes:
        steps: the denoising steps of the whole answer, a multiple of the number of blocks; without it one for
            each token.
        block_length: the tokens of a block; blocks are filled in one after the other, and streamed. Without
            it 32 for LLaDA, and one block for others.
        remasking: the order in which masks are filled in: `low_confidence` and `random` are LLaDA's,
            `origin`, `maskgit_plus`, `topk_margin` and `entropy` are Dream's. Without it `low_confidence`,
            and for Dream `entropy`, or `maskgit_plus` with a threshold or a factor.
        alg_temp: randomness of that order, for Dream's orders but `origin`; 0 is none.
        eps: the last time of Dream's schedule.
        guidance_scale: classifier-free guidance; 0 is off, and above 0 each step takes two passes.
        parallel_decoding: with `confidence_threshold` or `factor`, fill in more than the schedule says.
        confidence_threshold: fill in all tokens that are surer than this in one step, at least one.
        factor: fill in as many of the surest tokens as this bounds the error of (Fast-dLLM).
        cache: keys and values that are not computed in every step: `none` is exact; `prefix`: those before
            the block; `dual`: those of all other tokens (Fast-dLLM; both change answers).
        early_stop: end at an end token before which nothing is masked; the text is the same.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "alg": "remasking",
        "block_size": "block_length",
        "cfg_scale": "guidance_scale",
        "denoising_steps": "steps",
        "diffusion_steps": "steps",
        "enable_early_stopping": "early_stop",
        "num_inference_steps": "steps",
        "threshold": "confidence_threshold",
    }

    steps: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    block_length: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    remasking: Remasking | None = None
    alg_temp: Annotated[float, Meta(ge=0, le=100)] = 0.0
    eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-3
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] = 0.0
    parallel_decoding: bool = True
    confidence_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    factor: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    cache: Literal["none", "prefix", "dual"] = "none"
    early_stop: bool = True
