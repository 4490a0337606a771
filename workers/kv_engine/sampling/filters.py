"""Filters: top-k, top-p and min-p as one threshold per row on the sampler's integer weights.

Each keeps the tokens of at least some weight, so all of them together keep those of at least the greatest.
What a filter asks is the greatest weight at and above which a row has enough: k tokens, or a share of its
mass. It is searched, not sorted.

A weight has 33 bits. A histogram of the first eleven says in which of 2048 ranges the threshold lies, one
of the next eleven where in that range, one of the last which weight it is. Sums of integers are exact and
know no order, so rows that are wide, flat or full of ties come out as a sort would have them. What is
found depends on nothing but the row, and how much work it is on nothing but its width: 35 ms for the top-p
of 32 x 150k weights on one core, where a sort takes 200 to 430 (2026-11). Where every row keeps a few by
top-k, those few are ranked instead.
"""

from typing import Final

import torch

from workers.kv_engine.sampling.sampling_rows import SamplingRows

WEIGHT_ONE: Final = 2**32
"""The weight of the likeliest token; the rest is relative to it. 2**18 tokens of it sum up below 2**53."""

_DIGIT_BITS: Final = 11
_SHIFTS: Final = (22, 11, 0)
"""Three digits cover `WEIGHT_ONE`."""
_MOST_RANKED: Final = 1024
"""Beyond so many, ranking costs more than searching."""
_CACHED_WEIGHTS: Final = 2**19
"""So many weights are told by their digits at a time on a CPU: fresh memory would take half of the time."""


def threshold(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The least weight that each row keeps: (S, V) int64 to (S,).

    Of the tokens that top-k keeps, top-p keeps the fewest that hold its share; min-p is measured by the
    likeliest token, which all of them keep.
    """
    least = torch.zeros_like(weights[:, 0])
    if rows.has_top_k or rows.has_top_p:
        is_narrow = rows.candidates is not None and rows.candidates <= _MOST_RANKED
        least = _ranked(weights, rows) if is_narrow else _searched(weights, rows)
    if rows.has_min_p:
        least = torch.maximum(least, (rows.min_p.double() * WEIGHT_ONE).long())
    return least


def _ranked(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Where every top-p has a top-k beside it, so that the `candidates` likeliest decide."""
    assert rows.candidates is not None
    width = min(rows.candidates, weights.shape[-1])
    ranked = weights.topk(width, dim=-1).values  # (S, width), descending
    last = (rows.top_k.long().clamp(max=width) - 1).clamp(min=0)
    kth = torch.where(rows.top_k > 0, ranked.gather(-1, last[:, None])[:, 0], 0)
    if not rows.has_top_p:
        return kth
    needed = _share(weights, rows, kth)
    reached = ranked.cumsum(-1) < needed[:, None]  # ranks before the one that reaches the share
    at = torch.minimum(reached.sum(-1), last)
    nucleus = ranked.gather(-1, at[:, None])[:, 0]
    return torch.where(rows.top_p < 1, torch.maximum(nucleus, kth), kth)


def _searched(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Where a top-p, or a top-k beside it, may reach far down."""
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
    """How much weight top-p asks for, of what is at least `least`: (S,)."""
    kept = weights if not rows.has_top_k else torch.where(weights >= least[:, None], weights, 0)
    return (rows.top_p.double() * kept.sum(-1).double()).ceil().long()


def greatest_with(weights: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The greatest weight at and above which the amounts of each row come to what is `needed`.

    Args:
        weights: (S, V) int64, from 0 to `WEIGHT_ONE`.
        amounts: (S, V) int64, not negative.
        needed: (S,) int64, at most the row's whole amount; 0 is for a row that does not ask.
    """
    height = max(1, _CACHED_WEIGHTS // weights.shape[-1]) if weights.device.type == "cpu" else len(weights)
    parts = zip(*(torch.split(values, height) for values in (weights, amounts, needed)), strict=True)
    return torch.cat([_by_digits(*part) for part in parts])


def _by_digits(weights: torch.Tensor, amounts: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The same, of rows that fit the cache."""
    digits = 1 << _DIGIT_BITS
    found = torch.zeros_like(needed)[:, None]  # (S, 1)
    above = torch.zeros_like(found)
    places = torch.empty_like(weights)
    for shift in _SHIFTS:
        # Place 0 is for what is below the range that was found, and the last for what is above it.
        torch.sub(weights, found - (1 << shift), out=places)
        places.bitwise_right_shift_(shift).clamp_(0, digits + 1)
        sums = amounts.new_zeros(len(weights), digits + 2).scatter_add_(-1, places, amounts)
        inside = sums[:, 1:-1].flip(-1)  # the largest digit first
        reached = inside.cumsum(-1).add_(above) >= needed[:, None]
        at = reached.long().argmax(-1, keepdim=True)  # the first of those that suffice
        above += inside.cumsum(-1).gather(-1, at) - inside.gather(-1, at)
        found += (digits - 1 - at) << shift
    return found[:, 0]
