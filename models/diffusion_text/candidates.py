"""The token that a denoising step would fill in at each place of a block, and its confidence.

filtered    LLaDA2's: drawn after temperature, top-k and top-p; the confidence is its probability among those
plain       dllm-hub's: drawn with Gumbel noise; the confidence is its probability before the temperature
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.diffusion_text import filters
from models.sequence_request import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """A token for each of L places: `ids` (L,) int64 and `confidence` (L,) float32."""

    ids: torch.Tensor
    confidence: torch.Tensor


Draw = Callable[[torch.Tensor, SamplingParams, torch.Generator], Candidates]
"""Draws candidates of logits, (L, vocab) float32. Without a temperature nothing is random."""


def filtered(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> Candidates:
    """Draw as LLaDA2's `generate` does."""
    probabilities = filters.filtered(logits, sampling).softmax(-1)
    if sampling.temperature:
        ids = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    else:
        ids = probabilities.argmax(-1)
    return Candidates(ids, probabilities.gather(-1, ids[:, None])[:, 0])


def plain(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> Candidates:
    """Draw as dllm-hub's samplers do; top-k and top-p limit what is drawn."""
    ids = filtered(logits, sampling, generator).ids
    return Candidates(ids, torch.softmax(logits, dim=-1).gather(-1, ids[:, None])[:, 0])
