"""Temperature, min-p, top-k and top-p, and the cut of the mask token, for all places of a block at once."""

import math
from typing import Final

import torch

from models.sequence_request import SamplingParams

_LEAST_TEMPERATURE: Final = 1e-30
"""Below this, logits divided by the temperature overflow; the draw is the likeliest token anyway."""


def filtered_logits(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return logits after temperature, min-p, top-k and top-p: those that are cut off are -inf."""
    if sampling.temperature:
        logits = logits / max(sampling.temperature, _LEAST_TEMPERATURE)
    if sampling.min_p:
        least = logits.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_k and 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is None or sampling.top_p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    before = torch.softmax(ordered, dim=-1).cumsum(-1).roll(1, dims=-1)
    before[:, 0] = 0
    return logits.scatter(-1, order, ordered.masked_fill(before > sampling.top_p, -torch.inf))


def without_mask(logits: torch.Tensor, mask_id: int) -> torch.Tensor:
    """Return logits in which the mask is impossible. A model may have no logit for it."""
    logits = logits.clone()
    if mask_id < logits.shape[-1]:
        logits[:, mask_id] = -torch.inf
    return logits
