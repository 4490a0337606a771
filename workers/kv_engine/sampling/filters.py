"""Top-k, top-p and min-p filters, as one threshold per row on the sampler's integer weights.

Each filter keeps all tokens of at least some weight, so all filters together keep those above the greatest
of these thresholds. A filter's threshold is the greatest weight at and above which a row has enough: k
tokens, or a share of its mass. It is searched and not sorted.

A weight has 33 bits. A histogram of the highest eleven bits finds which of 2048 ranges holds the threshold,
one of the next eleven bits finds the range in that one, and the last one finds the weight. Integer sums are
exact in any order, so wide, flat or tied rows give the same result as a sort. The result depends on the row
only, and the cost on its width only: top-p of 32 x 150k weights takes 35 ms on one core, and a sort 200 to
430 ms (2026-11). If top-k leaves few tokens in every row, those are ranked instead.
"""

from typing import Final

import torch

from workers.kv_engine.sampling.sampling_rows import SamplingRows

WEIGHT_ONE: Final = 2**32
"""The weight of the likeliest token; others are relative to it. The sum of 2**18 of them is below 2**53."""

_DIGIT_BITS: Final = 11
_SHIFTS: Final = (22, 11, 0)
"""Three digits cover `WEIGHT_ONE`."""
_MOST_RANKED: Final = 1024
"""With more candidates, ranking costs more than searching."""
_CACHED_WEIGHTS: Final = 2**19
"""The number of weights processed at a time on a CPU: fresh memory would take half of the time."""


def threshold(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the least weight that each row keeps: (S, V) int64 to (S,).

    Top-p keeps the fewest of top-k's tokens that hold its share. Min-p is relative to the likeliest token,
    which every filter keeps.
    """
    least = torch.zeros_like(weights[:, 0])
    if rows.has_top_k or rows.has_top_p:
        is_narrow = rows.candidates is not None and rows.candidates <= _MOST_RANKED
        least = _ranked(weights, rows) if is_narrow else _searched(weights, rows)
    if rows.has_min_p:
        least = torch.maximum(least, (rows.min_p.double() * WEIGHT_ONE).long())
    return least


def _ranked(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The threshold if every row with top-p has a top-k, so that the `candidates` likeliest tokens decide."""
    assert rows.candidates is not None
    width = min(rows.candidates, weights.shape[-1])
    ranked = weights.topk(width, dim=-1).values  # (S, width), descending
    last = (rows.top_k.long().clamp(max=width) - 1).clamp(min=0)
    kth = torch.where(rows.top_k > 0, ranked.gather(-1, last[:, None])[:, 0], 0)
    if not rows.has_top_p:
        return kth
    needed = _share(weights, rows, kth)
    reached = ranked.cumsum(-1) < needed[:, None]  # true for ranks before the one that reaches the share
    at = torch.minimum(reached.sum(-1), last)
    nucleus = ranked.gather(-1, at[:, None])[:, 0]
    return torch.where(rows.top_p < 1, torch.maximum(nucleus, kth), kth)


def _searched(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The threshold if a filter may keep many tokens."""
    least = torch.zeros_like(weights[:, 0])
    is_random = rows.temperature > 0
    if rows.has_top_k:
        counts = torch.ones_like(weights[:1, :1]).expand_as(weights)
        wanted = torch.where(is_random, rows.top_k.long(), 0).clamp(min=0, max=weights.shape[-1])
        least = torch.where(wanted > 0, greatest_with(weights, counts, wanted), 0)
    if rows.has_top_p:
        needed = torch.where(is_random & (rows.top_p < 1), _share(weights, rows, least), 0)
        least = torch.maximum(least, torch.where(needed > 0, greatest_with(weights, weights, needed), 0))
    return least


def _share(weights: torch.Tensor, rows: SamplingRows, least: torch.Tensor) -> torch.Tensor:
    """Return the weight that top-p needs, of tokens with at least `least`: (S,)."""
    kept = weights if not rows.has_top_k else torch.where(weights >= least[:, None], weights, 0)
    return (rows.top_p.double() * kept.sum(-1).double()).ceil().long()


def greatest_with(weights: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Return the greatest weight at and above which the amounts of each row sum to at least `needed`.

    Args:
        weights: (S, V) int64, from 0 to `WEIGHT_ONE`.
        amounts: (S, V) int64, not negative.
        needed: (S,) int64, at most the row's total; 0 for rows without this filter.
    """
    height = max(1, _CACHED_WEIGHTS // weights.shape[-1]) if weights.device.type == "cpu" else len(weights)
    parts = zip(*(torch.split(values, height) for values in (weights, amounts, needed)), strict=True)
    return torch.cat([_by_digits(*part) for part in parts])


def _by_digits(weights: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The same for rows that fit the cache."""
    digits = 1 << _DIGIT_BITS
    found = torch.zeros_like(needed)[:, None]  # (S, 1)
    above = torch.zeros_like(found)
    places = torch.empty_like(weights)
    for shift in _SHIFTS:
        # Place 0 counts weights below the current range, and the last place those above it.
        torch.sub(weights, found - (1 << shift), out=places)
        places.bitwise_right_shift_(shift).clamp_(0, digits + 1)
        sums = amounts.new_zeros(len(weights), digits + 2).scatter_add_(-1, places, amounts)
        inside = sums[:, 1:-1].flip(-1)  # the largest digit first
        reached = inside.cumsum(-1).add_(above) >= needed[:, None]
        at = reached.long().argmax(-1, keepdim=True)  # the first digit that suffices
        above += inside.cumsum(-1).gather(-1, at) - inside.gather(-1, at)
        found += (digits - 1 - at) << shift
    return found[:, 0]
