"""The sampler: logits to tokens, for all rows at once.

The order is that of transformers. First the logits are adjusted
(`workers.kv_engine.sampling.logits_processors`): logit bias, repetition, presence and frequency penalties,
bad words, `min_tokens`. Then temperature, top-k, top-p and min-p, each on the tokens that the previous one
keeps (`workers.kv_engine.sampling.filters`); then the draw. A greedy row takes the likeliest token after the
adjustments. Log probabilities are of the logits before them.

Random numbers are computed, not drawn from a generator: those of a row are an integer hash of (seed, node,
sample index, draw index). They are the same bits on every device, in any row, and in any batch. From there on
all arithmetic is in integers: a token's weight is its probability in fixed point, so sums are exact in any
order; filters are thresholds on weights; and one uniform integer below their sum selects the token. Equal
logits always give equal tokens.

Tokens with the same weight as the last one that a filter keeps are kept, too.
"""

import hashlib
from typing import Final

import torch

from workers.kv_engine.sampling.filters import WEIGHT_ONE, threshold
from workers.kv_engine.sampling.sampling_rows import SamplingRows

NOT_A_TOKEN: Final = -1
"""The token of a row whose logits contain NaN or are all minus infinity."""


def node_key(name: str) -> int:
    """Return the node's part of the random key: a signed 64-bit hash of its name, equal in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def sample(logits: torch.Tensor, rows: SamplingRows, node: int) -> torch.Tensor:
    """Return the next token of each row: (S, V) float32 logits to (S,) int64 ids.

    A row that contains NaN, or has no logit above minus infinity, gives `NOT_A_TOKEN`.
    """
    top, greedy = logits.max(dim=-1)
    tokens = greedy
    if rows.is_random:
        tokens = torch.where(rows.temperature > 0, _draw(logits, top, rows, node), greedy)
    return torch.where(torch.isfinite(top), tokens, NOT_A_TOKEN)


def _draw(logits: torch.Tensor, top: torch.Tensor, rows: SamplingRows, node: int) -> torch.Tensor:
    # Avoid a division by zero for greedy rows; their draw is not used.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    shares = (logits - top[:, None]).div_(temperature[:, None]).exp_()
    # This conversion to fixed point is exact: the scale is a power of two.
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
    """Return 64 random bits per row: (S,) int64."""
    seed = (rows.seed_high.long() << 32) | (rows.seed_low.long() & 0xFFFFFFFF)
    bits = _mix(seed)
    bits = _mix(bits ^ node)
    bits = _mix(bits ^ rows.sample_index.long())
    return _mix(bits ^ rows.draw_index.long())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The step and finaliser of SplitMix64 (Steele, Lea, Flood 2014); int64 wraps like its uint64."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros and not with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
