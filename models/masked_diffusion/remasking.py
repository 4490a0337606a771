"""The published rules of LLaDA and Dream: the tokens that a step would fill in, their order and their number.

LLaDA (Nie et al., arXiv:2502.09992) draws with a temperature, and orders by the probability without it; its
steps fill in equal shares. Dream (Ye et al., arXiv:2508.15487) draws and orders by the probabilities after
temperature, top-p and top-k; its shares follow a time from 1 to `eps`.
"""

from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch

from models.diffusion_text.candidates import Candidates, Draw, draw_filtered, draw_plain
from models.diffusion_text.filters import filtered_logits
from models.masked_diffusion.options import MaskedDiffusionOptions, Remasking
from models.sequence_request import SamplingParams

OF_DREAM: Final = frozenset({"origin", "maskgit_plus", "topk_margin", "entropy"})
OF_PROBABILITY: Final = frozenset({"low_confidence", "maskgit_plus"})
"""Orders whose confidence is a probability, so that a threshold has a meaning."""
_TINY: Final = 1e-10


def remasking_of(options: MaskedDiffusionOptions, *, is_dream: bool) -> Remasking:
    """Return the order of a request."""
    if options.remasking is not None:
        return options.remasking
    if not is_dream:
        return "low_confidence"
    return "maskgit_plus" if is_parallel(options) else "entropy"


def is_parallel(options: MaskedDiffusionOptions) -> bool:
    """Return whether steps may fill in more than the schedule says."""
    return options.parallel_decoding and (
        options.confidence_threshold is not None or options.factor is not None
    )


def draw_of(remasking: Remasking, alg_temp: float) -> Draw:
    """Return the function that draws tokens and confidences."""
    if remasking in OF_DREAM:
        return partial(_dream, remasking=remasking, alg_temp=alg_temp)
    return _random if remasking == "random" else draw_plain


def _random(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> Candidates:
    ids = draw_plain(logits, sampling, generator).ids
    return Candidates(ids, _uniform(ids, generator))


def _dream(
    logits: torch.Tensor,
    sampling: SamplingParams,
    generator: torch.Generator,
    *,
    remasking: Remasking,
    alg_temp: float,
) -> Candidates:
    # Dream applies top-p before top-k.
    logits = filtered_logits(logits, msgspec.structs.replace(sampling, top_k=None))
    logits = filtered_logits(logits, SamplingParams(top_k=sampling.top_k))
    drawn = SamplingParams(temperature=1.0 if sampling.temperature else None)
    found = draw_filtered(logits, drawn, generator)
    confidence = found.confidence
    if remasking == "origin":
        return Candidates(found.ids, _uniform(found.ids, generator))
    if remasking == "topk_margin":
        first, second = logits.softmax(-1).topk(2).values.unbind(-1)
        confidence = first - second
    if remasking == "entropy":
        probabilities = logits.softmax(-1)
        confidence = (probabilities * (probabilities + _TINY).log()).sum(-1)
    if alg_temp:
        # The largest of these are a sample without replacement, by softmax(confidence / alg_temp).
        noise = torch.empty_like(confidence).exponential_(generator=generator).clamp_min(_TINY).log()
        confidence = confidence / alg_temp - noise
    return Candidates(found.ids, confidence)


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(len(like), generator=generator, device=like.device)


def dream_shares(tokens: int, steps: int, eps: float) -> list[int]:
    """Return the number of tokens of each step; steps without one are left out.

    A step from time t to s fills in the share 1 - s / t of what is left, cut to a whole number: 16 tokens in
    16 steps are 1, 1, ..., 2.
    """
    times = torch.linspace(1, eps, steps + 1).numpy()
    parts = 1 - times[1:] / times[:-1]
    shares: list[int] = []
    left = tokens
    for part in parts[:-1]:
        share = int(np.float32(left) * part)
        left -= share
        shares.append(share)
    return [share for share in (*shares, left) if share]


def origin_shares(tokens: int, steps: int, eps: float, generator: torch.Generator) -> list[int]:
    """Return the numbers of tokens of Dream's `origin`: each mask is filled in with the same chance.

    After a step to time t a mask is left with the probability t, and none after the last step.
    """
    times = torch.linspace(1, eps, steps + 1, device=generator.device)[1:-1]
    draws = torch.rand(tokens, generator=generator, device=generator.device)
    steps_of = torch.searchsorted(-times, -draws)
    shares: list[int] = steps_of.bincount().tolist()
    return [share for share in shares if share]
