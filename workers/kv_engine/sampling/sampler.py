"""The sampler: logits to tokens, for all rows at once.

The order is transformers': what changes logits comes first (`workers.kv_engine.sampling.logits_processors`:
logit bias,
repetition, presence and frequency penalties, bad words, `min_tokens`), then temperature, top-k, top-p and
min-p, each of what the one before it keeps (`workers.kv_engine.sampling.filters`), then the draw. A greedy
row takes
the likeliest token behind the first group. Log probabilities are of the logits as the model made them.

Randomness is counted, not drawn: the draw of a row is an integer hash of (seed, node, sample index,
draw index), the same bits on every device, whatever row the sequence sits in and whoever sits beside
it. From there on everything is integers: a token's weight is its probability in fixed point, so that
sums are exact and do not depend on their order; filters are thresholds on weights, and one uniform
integer below their sum picks the token. Equal logits give equal tokens, always.

Tokens that tie with the last one a filter keeps are kept too.
"""

import hashlib
from typing import Final

import torch

from workers.kv_engine.sampling.filters import WEIGHT_ONE, threshold
from workers.kv_engine.sampling.sampling_rows import SamplingRows

NOT_A_TOKEN: Final = -1
"""Stands for a row whose logits are not numbers."""


def node_key(name: str) -> int:
    """The node's part of the key: a signed 64-bit hash of its name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def sample(logits: torch.Tensor, rows: SamplingRows, node: int) -> torch.Tensor:
    """The next token of each row: (S, V) float32 logits to (S,) int64 ids.

    A row that holds a NaN, or nothing above minus infinity, gives `NOT_A_TOKEN`.
    """
    top, greedy = logits.max(dim=-1)
    tokens = greedy
    if rows.is_random:
        tokens = torch.where(rows.temperature > 0, _draw(logits, top, rows, node), greedy)
    return torch.where(torch.isfinite(top), tokens, NOT_A_TOKEN)


def _draw(logits: torch.Tensor, top: torch.Tensor, rows: SamplingRows, node: int) -> torch.Tensor:
    # A greedy row among random ones must not divide by zero; its draw is thrown away.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    shares = (logits - top[:, None]).div_(temperature[:, None]).exp_()
    # To fixed point exactly: the scale is a power of two, and a float32 times it fits.
    weights = shares.nan_to_num_(nan=0.0).mul_(WEIGHT_ONE).long()  # (S, V)
    if rows.is_filtered:
        weights.masked_fill_(weights < threshold(weights, rows)[:, None], 0)
    running = weights.cumsum_(-1)
    total = running[:, -1].clamp(min=1)
    # 53 random bits times the total, both exact in float64, so the product rounds the same everywhere.
    unit = _shift_right(_draw_bits(rows, node), 11).double() * 2.0**-53
    point = torch.minimum((unit * total.double()).long(), total - 1)
    picked = torch.searchsorted(running, point[:, None], right=True)[:, 0]
    return picked.clamp(max=logits.shape[-1] - 1)


def _draw_bits(rows: SamplingRows, node: int) -> torch.Tensor:
    """64 random bits per row: (S,) int64."""
    seed = (rows.seed_high.long() << 32) | (rows.seed_low.long() & 0xFFFFFFFF)
    bits = _mix(seed)
    bits = _mix(bits ^ node)
    bits = _mix(bits ^ rows.sample_index.long())
    return _mix(bits ^ rows.draw_index.long())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step and finaliser (Steele, Lea, Flood 2014); int64 wraps as its uint64 does."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros, not the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
