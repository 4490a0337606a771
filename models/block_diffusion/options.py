"""The request parameters of block diffusion models. No torch."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta


class BlockDiffusionOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of an answer that is denoised block by block.

    Attributes:
        steps: the denoising steps of a block; without it one for each of its tokens. With parallel decoding a
            block takes fewer.
        block_length: the tokens of a block; without it as the model was trained.
        remasking: the tokens that stay masked: those of low confidence, or random ones.
        guidance_scale: classifier-free guidance; 0 is off, and above 0 each step takes two passes.
        parallel_decoding: fill in all tokens above `confidence_threshold` in one step.
        confidence_threshold: without it as the model's own generation does: 0.95 for LLaDA2, and none for
            others, which then fill in what `steps` says.
        editing_threshold: replace tokens that are filled in already by surer ones (LLaDA2.1); without it they
            stand.
        max_post_steps: with editing, the most steps after a block has no masks.
        early_stop: end a block at an end-of-text token before which nothing is masked.
    """

    steps: Annotated[int, Meta(ge=1, le=4096)] | None = None
    block_length: Annotated[int, Meta(ge=1, le=4096)] | None = None
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] = 0.0
    parallel_decoding: bool = True
    confidence_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    editing_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_post_steps: Annotated[int, Meta(ge=0, le=1024)] = 16
    early_stop: bool = True

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "block_size": "block_length",
        "cfg_scale": "guidance_scale",
        "denoising_steps": "steps",
        "diffusion_steps": "steps",
        "edit_threshold": "editing_threshold",
        "enable_early_stopping": "early_stop",
        "eos_early_stop": "early_stop",
        "num_inference_steps": "steps",
        "steps_per_block": "steps",
        "threshold": "confidence_threshold",
    }
    """The names of LLaDA2, dllm-hub, diffusers, SGLang and dfastllm for these options."""
