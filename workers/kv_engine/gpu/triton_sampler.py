"""The sampler as one Triton kernel: one program per row, and no operation over the whole batch.

    read the row      its likeliest token
    read it again     total weight; number and weight of the tokens above two marks
    read it again     list the tokens above a mark that is low enough for the row's filters
    search the list   the least weight that top-k and top-p keep
    draw              in the list, in the order of the vocabulary

A row without top-k and top-p has no list, and a row whose list would be too long (nearly equal logits, a
large top-k) is searched as a whole, which takes several times longer. A greedy row ends after the first
reading.

The weights, filters and random bits are those of `workers.kv_engine.sampling.sampler`, in integers, so the
result does not depend on other rows. The exponential of a GPU may differ in its last bit from a CPU's.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from workers.kv_engine.attention.triton import device_guard
from workers.kv_engine.sampling.sampling_rows import SamplingRows

LISTED: Final = 4096
"""The most tokens of a list."""
_TILE: Final = 4096
"""With 8192, 150 bytes of registers per thread are spilled to memory (Triton 3.6 and 3.7)."""


def sample_rows(
    logits: torch.Tensor, rows: SamplingRows, node: int, *, listed: int = LISTED, tile: int = _TILE
) -> torch.Tensor:
    """Return the next token of each row: (S, V) float32 logits to (S,) int64 ids; -1 without a valid logit.

    Args:
        logits: each row is contiguous.
        rows: their sampling parameters.
        node: the node's part of the random key.
        listed: the most tokens of a row's list, a power of two.
        tile: the number of tokens read at a time, a power of two.
    """
    count, width = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    is_listing = rows.has_top_k or rows.has_top_p
    weights = torch.empty((count if is_listing else 0, listed), dtype=torch.int64, device=logits.device)
    ids = torch.empty(weights.shape, dtype=torch.int32, device=logits.device)
    with device_guard(logits):
        _sample[(count,)](
            tokens,
            logits,
            weights,
            ids,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            rows.min_p,
            rows.seed_low,
            rows.seed_high,
            rows.sample_index,
            rows.draw_index,
            node,
            width,
            logits.stride(0),
            is_listing=is_listing,
            listed=listed,
            tile=tile,
            num_warps=16,
        )
    return tokens


# ---- the kernel ------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64 of uint64, as in `workers.kv_engine.sampling.sampler`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _unit(
    seed_low: tl.tensor, seed_high: tl.tensor, node: tl.tensor, sample: tl.tensor, draw: tl.tensor
) -> tl.tensor:
    """A random number below 1 with 53 bits, exact in float64."""
    bits = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    bits |= seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    bits = _mix(bits) ^ node.to(tl.int64).to(tl.uint64, bitcast=True)
    bits = _mix(bits) ^ sample.to(tl.int64).to(tl.uint64, bitcast=True)
    bits = _mix(bits) ^ draw.to(tl.int64).to(tl.uint64, bitcast=True)
    return (_mix(bits) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _point(unit: tl.tensor, total: tl.tensor) -> tl.tensor:
    """An integer below the total of the weights, `unit` of the way; both are exact in float64."""
    return tl.minimum((unit * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _weights(
    row: tl.tensor, place: tl.tensor, width: tl.tensor, top: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """The weights of the tokens at `place`, from 0 to 2**32."""
    logit = tl.load(row + place, mask=place < width, other=float("-inf"))
    return (tl.exp(tl.div_rn(logit - top, temperature)) * 4294967296.0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _from(weight: tl.tensor, least: tl.tensor, by_weight: tl.constexpr) -> tl.tensor:
    """The sum of the weights of at least `least`, or their number."""
    amount = weight if by_weight else tl.full(weight.shape, 1, tl.int64)
    return tl.sum(tl.where(weight >= least, amount, 0), 0)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _all_from(
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    by_weight: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The same of a whole row."""
    sums = tl.zeros((tile,), tl.int64)
    for start in range(0, width, tile):
        weight = _weights(row, start + tl.arange(0, tile), width, top, temperature)
        if by_weight:
            sums += tl.where(weight >= least, weight, 0)
        else:
            sums += (weight >= least).to(tl.int64)
    return tl.sum(sums, 0)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _amount(
    kept: tl.tensor,
    is_listed: tl.tensor,
    least: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    by_weight: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The same of the list, if the row has one, else of the row."""
    if is_listed:
        amount = _from(kept, least, by_weight)
    else:
        amount = _all_from(row, width, top, temperature, least, by_weight, tile)
    return amount


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _threshold(
    kept: tl.tensor,
    is_listed: tl.tensor,
    low: tl.tensor,
    needed: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    by_weight: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The greatest weight at and above which the row has `needed`; it is at least `low`."""
    high = low * 0 + 4294967297  # one more than the greatest weight
    for _ in range(33):
        middle = (low + high) >> 1
        amount = _amount(kept, is_listed, middle, row, width, top, temperature, by_weight, tile)
        is_enough = amount >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _marked(
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    listed: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The row's weight; the number and weight of its tokens above a mark, and that mark.

    Of two marks, 2**-6 and 2**-12 of the likeliest token's weight, it is the lower one if the list has room.
    """
    near: tl.constexpr = 1 << 26
    far: tl.constexpr = 1 << 20
    sums = tl.zeros((tile,), tl.int64)
    near_sums = tl.zeros((tile,), tl.int64)
    far_sums = tl.zeros((tile,), tl.int64)
    near_counts = tl.zeros((tile,), tl.int32)
    far_counts = tl.zeros((tile,), tl.int32)
    for start in range(0, width, tile):
        weight = _weights(row, start + tl.arange(0, tile), width, top, temperature)
        sums += weight
        near_sums += tl.where(weight >= near, weight, 0)
        far_sums += tl.where(weight >= far, weight, 0)
        near_counts += (weight >= near).to(tl.int32)
        far_counts += (weight >= far).to(tl.int32)
    count = tl.sum(far_counts, 0)
    is_far = count <= listed
    count = tl.where(is_far, count, tl.sum(near_counts, 0))
    above = tl.where(is_far, tl.sum(far_sums, 0), tl.sum(near_sums, 0))
    return tl.sum(sums, 0), count, above, tl.where(is_far, far, near).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _listed(
    list_weights: tl.tensor,
    list_ids: tl.tensor,
    mark: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    listed: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """List the tokens of at least the weight `mark`; return their weights, and 0 behind them."""
    found = tl.zeros((), tl.int32)
    for start in range(0, width, tile):
        place = start + tl.arange(0, tile)
        weight = _weights(row, place, width, top, temperature)
        is_above = weight >= mark
        to = found + tl.cumsum(is_above.to(tl.int32), 0) - 1
        tl.store(list_weights + to, weight, mask=is_above)
        tl.store(list_ids + to, place, mask=is_above)
        found += tl.sum(is_above.to(tl.int32), 0)
    tl.debug_barrier()  # all threads have stored before one of them reads
    at = tl.arange(0, listed)
    return tl.load(list_weights + at, mask=at < found, other=0)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _picked(
    point: tl.tensor,
    least: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    tile: tl.constexpr,
) -> tl.tensor:
    """The first token of the row at which the sum of weights of at least `least` exceeds `point`."""
    token = tl.zeros((), tl.int32)
    running = tl.zeros((), tl.int64)
    for start in range(0, width, tile):
        weight = _weights(row, start + tl.arange(0, tile), width, top, temperature)
        weight = tl.where(weight >= least, weight, 0)
        here = tl.sum(weight, 0)
        if (running <= point) & (running + here > point):
            token = start + tl.sum((running + tl.cumsum(weight, 0) <= point).to(tl.int32), 0)
        running += here
    return token


@triton.jit(do_not_specialize=["node", "width"])  # type: ignore[untyped-decorator] # triton has no types
def _sample(
    tokens: tl.tensor,  # (S,) int64
    logits: tl.tensor,  # (S, V) float32
    list_weights: tl.tensor,  # (S, listed) int64
    list_ids: tl.tensor,  # (S, listed) int32
    temperatures: tl.tensor,
    top_ps: tl.tensor,
    top_ks: tl.tensor,
    min_ps: tl.tensor,
    seed_low: tl.tensor,
    seed_high: tl.tensor,
    sample_index: tl.tensor,
    draw_index: tl.tensor,
    node: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    is_listing: tl.constexpr,
    listed: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0)
    row = logits + at.to(tl.int64) * stride
    place = tl.arange(0, tile)
    best = tl.full((tile,), float("-inf"), tl.float32)
    best_id = tl.zeros((tile,), tl.int32)
    is_nan = tl.zeros((tile,), tl.int32)
    for start in range(0, width, tile):
        logit = tl.load(row + start + place, mask=start + place < width, other=float("-inf"))
        is_nan |= (logit != logit).to(tl.int32)  # noqa: PLR0124 - true for NaN alone
        best_id = tl.where(logit > best, start + place, best_id)
        best = tl.maximum(best, logit)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_id, width), 0)
    is_valid = (tl.max(is_nan, 0) == 0) & (top > float("-inf")) & (top < float("inf"))
    temperature = tl.load(temperatures + at)
    if is_valid & (temperature > 0):
        least = tl.zeros((), tl.int64)
        is_listed = False
        kept = tl.zeros((listed,), tl.int64)
        begin = at.to(tl.int64) * listed  # of the row's list
        if is_listing:
            top_k = tl.minimum(tl.load(top_ks + at), width)
            top_p = tl.load(top_ps + at).to(tl.float64)
            if (top_k > 0) | (top_p < 1):
                total, count, above, mark = _marked(row, width, top, temperature, listed, tile)
                # With a top-k, top-p needs at most that share of all weights.
                most = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                has_enough = (top_k <= 0) | (count >= top_k)
                has_enough &= (top_k > 0) | (top_p >= 1) | (above >= most)
                is_listed = (count <= listed) & has_enough
                if is_listed:
                    kept = _listed(
                        list_weights + begin,
                        list_ids + begin,
                        mark,
                        row,
                        width,
                        top,
                        temperature,
                        listed,
                        tile,
                    )
                low = tl.where(is_listed, mark, 0)
                if top_k > 0:
                    least = _threshold(kept, is_listed, low, top_k, row, width, top, temperature, False, tile)
                if top_p < 1:
                    held = total
                    if top_k > 0:
                        held = _amount(kept, is_listed, least, row, width, top, temperature, True, tile)
                    needed = tl.ceil(top_p * held.to(tl.float64)).to(tl.int64)
                    if needed > 0:
                        nucleus = _threshold(
                            kept, is_listed, low, needed, row, width, top, temperature, True, tile
                        )
                        least = tl.maximum(least, nucleus)
        relative = (tl.load(min_ps + at).to(tl.float64) * 4294967296.0).to(tl.int64)
        least = tl.maximum(least, relative)
        unit = _unit(
            tl.load(seed_low + at),
            tl.load(seed_high + at),
            node,
            tl.load(sample_index + at),
            tl.load(draw_index + at),
        )
        if is_listed:
            kept = tl.where(kept >= least, kept, 0)
            slot = tl.sum((tl.cumsum(kept, 0) <= _point(unit, tl.sum(kept, 0))).to(tl.int32), 0)
            token = tl.load(list_ids + begin + slot)
        else:
            point = _point(unit, _all_from(row, width, top, temperature, least, True, tile))
            token = _picked(point, least, row, width, top, temperature, tile)
    tl.store(tokens + at, tl.where(is_valid, token, -1).to(tl.int64))
