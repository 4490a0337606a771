"""The token that a denoising step would fill in at each place of a block, and its confidence.

draw_filtered   LLaDA2's: the confidence is the token's probability after temperature, top-k and top-p
draw_plain      LLaDA's and dllm-hub's: the confidence is its probability before these
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.diffusion_text.filters import filtered_logits
from models.sequence_request import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """A token for each of L places: `ids` (L,) int64 and `confidence` (L,), in the dtype of the logits."""

    ids: torch.Tensor
    confidence: torch.Tensor


Draw = Callable[[torch.Tensor, SamplingParams, torch.Generator], Candidates]
"""Draws candidates of logits, (L, vocab) floats. Without a temperature nothing is random."""


def draw_filtered(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> Candidates:
    """Draw as LLaDA2's `generate` does."""
    probabilities = filtered_logits(logits, sampling).softmax(-1)
    if sampling.temperature:
        ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    else:
        ids = probabilities.argmax(-1)
    return Candidates(ids, probabilities.gather(-1, ids[:, None])[:, 0])


def draw_plain(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> Candidates:
    """Draw as LLaDA's and dllm-hub's samplers do; top-k and top-p limit what is drawn."""
    ids = draw_filtered(logits, sampling, generator).ids
    return Candidates(ids, torch.softmax(logits, dim=-1).gather(-1, ids[:, None])[:, 0])
