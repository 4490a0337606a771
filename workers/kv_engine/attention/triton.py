"""A Triton kernel for attention over the paged pool on GPUs, without gathering or padding.

One program per tile of queries, KV head and split of the keys reads its keys through the block table and
keeps a running maximum, sum and weighted values. The last program to end of a span whose keys were split
combines their results.

A tile holds queries of one span, for all heads that share a KV head, so these heads read the keys once. In a
step of decodes only, each span is one tile, and its keys are split if it has many: a long span then takes no
longer than all others together. In any other step a span has as many tiles as its queries need, and a
program searches the span of its tile. A step of decodes and prompt chunks is one launch.

The number of programs depends on the step's shape only; lengths, offsets and blocks are read on the device.
So a CUDA graph of a step stays valid while its sequences grow.

Triton is installed with CUDA builds of torch. With TRITON_INTERPRET=1 in the environment before this module
is imported, the kernels run on a CPU in numpy; the tests use that.

References: online softmax, Milakov and Gimelshein 2018; split keys, Dao et al. 2023 (Flash-Decoding); tiles
of queries packed with their heads and a static launch grid, Ringlein et al. 2025, arXiv 2511.11581.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from workers.kv_engine.step import Step

MAX_SPLITS: Final = 32
"""The most splits of the keys of a span."""
MIN_SPLIT_KEYS: Final = 256
"""Splits of fewer keys cost more than they save."""
_PROGRAMS_PER_PROCESSOR: Final = 8
"""Most of them end at once: a span has no more splits than its keys need."""
_COUNTERS: Final = 4096
"""The fewest counters of ended programs that are made."""
_LOCAL: Final = threading.local()
_MIN_TILE_ROWS: Final = 16
"""The least number of rows, columns and depth of a GPU's matrix product."""
_PREFILL_TILE_ROWS: Final = 64
"""Queries times heads of a tile in steps that have spans of more than one query."""
_PREFILL_TILE_ROWS_FLOAT32: Final = 32
_TILE_BYTES: Final = 16384
"""The most bytes of keys per loop iteration: twice keys and values fit into every GPU's shared memory."""
DEFAULT_STAGES: Final = 3
"""Of Triton's pipeline: the loads of a turn of the kernel's loop begin when the turn before has ended."""
decode_stages: Final[dict[tuple[torch.device, torch.dtype, int], int]] = {}
"""The measured stages of decodes, by device, dtype and head dimension (`workers.kv_engine.gpu.stages`)."""


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: Step,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    parts: int | None = None,
    split_keys: int = MIN_SPLIT_KEYS,
    stages: int | None = None,
) -> torch.Tensor:
    """Compute the attention of each token to its span's history: (T, H, D), in the dtype of `queries`.

    Args:
        queries: (T, H, D), the step's packed tokens.
        keys: (slots, K, D), contiguous; they include those of the step's tokens.
        values: (slots, K, D), contiguous.
        step: its spans, lengths and block table are read on the device.
        scaling: factor of the query-key products; None is the head dimension to the power of -1/2.
        window: number of keys that a query sees, its own included; None is all.
        softcap: limit of the scores' magnitude, applied with tanh; None is no limit.
        parts: the most splits of a decode's keys; None chooses for the step and the device.
        split_keys: the fewest keys of a split, rounded down to the keys of a turn of the kernel's loop.
        stages: of the pipeline of decodes; None chooses the measured ones, if they were measured.
    """
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    spans = len(step.rows)
    block_size, is_float32 = step.spans.block_size, keys.dtype is torch.float32
    if tokens == spans:  # every span has one query
        tile_rows, tile_queries, tiles = max(_MIN_TILE_ROWS, triton.next_power_of_2(group)), 1, spans
        capacity = step.block_table.shape[1] * block_size
        reach = capacity if window is None else min(capacity, window)
        parts = parts or split_count(spans * kv_heads, reach, processors=_processors(queries.device))
        warps = 4
        if stages is None and tile_rows == _MIN_TILE_ROWS:
            stages = decode_stages.get((keys.device, keys.dtype, dim))
    else:
        # Products of float32 need many registers: larger tiles, or fewer threads, spill them.
        tile_rows, warps = (_PREFILL_TILE_ROWS_FLOAT32, 8) if is_float32 else (_PREFILL_TILE_ROWS, 4)
        tile_rows = max(tile_rows, triton.next_power_of_2(group))
        tile_queries, parts, stages = tile_rows // group, 1, None
        tiles = tokens // tile_queries + spans  # see `_span_of`
    out = torch.empty((tokens, heads, dim), dtype=queries.dtype, device=queries.device)
    cut = (tokens, heads, parts) if parts > 1 else (0,)
    sums = torch.empty((*cut, dim), dtype=torch.float32, device=queries.device)
    tops, totals = (torch.empty(cut, dtype=torch.float32, device=queries.device) for _ in range(2))
    dim_ceil = max(_MIN_TILE_ROWS, triton.next_power_of_2(dim))
    tile_keys = min(
        32 if is_float32 else 64, max(_MIN_TILE_ROWS, _TILE_BYTES // (dim_ceil * keys.element_size()))
    )
    with device_guard(queries):
        _attend[(tiles, kv_heads, parts)](
            out,
            sums,
            tops,
            totals,
            _arrived(tiles * kv_heads if parts > 1 else 0, queries.device),
            queries,
            keys,
            values,
            step.query_offsets,
            step.kv_lengths,
            step.rows,
            step.block_table,
            spans,
            parts,
            dim**-0.5 if scaling is None else scaling,
            queries.stride(0),
            queries.stride(1),
            step.block_table.stride(0),
            block_size=block_size,
            kv_heads=kv_heads,
            group=group,
            dim=dim,
            dim_ceil=dim_ceil,
            tile_queries=tile_queries,
            tile_rows=tile_rows,
            tile_keys=tile_keys,
            window=window or 0,
            softcap=softcap or 0.0,
            is_cut=parts > 1,
            split_turns=max(1, split_keys // tile_keys),
            num_warps=warps,
            num_stages=stages or DEFAULT_STAGES,
        )
    return out


def _arrived(count: int, device: torch.device) -> torch.Tensor:
    """Return `count` int32 counters of ended programs, all 0; each launch leaves them at 0.

    The launches of one thread are in order, so they share their counters. A CUDA graph keeps their address:
    the largest ones are made in its warm-up, and stay.
    """
    made: dict[torch.device, list[torch.Tensor]] = _LOCAL.__dict__.setdefault("counters", {})
    counters = made.setdefault(device, [])
    if not counters or len(counters[-1]) < count:
        counters.append(torch.zeros(max(count, _COUNTERS), dtype=torch.int32, device=device))
    return counters[-1]


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Make the tensor's GPU the current device inside: Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def split_count(programs: int, reach: int, *, processors: int) -> int:
    """Return the most splits of up to `reach` keys that keep a GPU busy."""
    wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // programs)
    return max(1, min(wanted, reach // MIN_SPLIT_KEYS, MAX_SPLITS))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ---- the kernels -----------------------------------------------------------------------------------
# A pointer has the name of the data it points to.


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _span_of(
    tile: tl.tensor, query_offsets: tl.tensor, spans: tl.tensor, tile_queries: tl.constexpr
) -> tl.tensor:
    """Return the span of a tile: the last span whose first tile is not after it.

    Span n begins at tile `query_offsets[n] // tile_queries + n`. So each span has as many tiles as it needs,
    and at most one spare tile.
    """
    found, end = 0, spans
    while end - found > 1:
        middle = (found + end) // 2
        is_after = tl.load(query_offsets + middle) // tile_queries + middle > tile
        end = tl.where(is_after, middle, end)
        found = tl.where(is_after, found, middle)
    return found


@triton.jit(do_not_specialize=["spans", "parts"])  # type: ignore[untyped-decorator] # triton has no types
def _attend(
    out: tl.tensor,  # (T, H, D)
    sums: tl.tensor,  # (T, H, parts, D) float32, if keys are split
    tops: tl.tensor,  # (T, H, parts) float32
    totals: tl.tensor,  # (T, H, parts) float32
    arrived: tl.tensor,  # (tiles, K) int32, if keys are split
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_offsets: tl.tensor,
    kv_lengths: tl.tensor,
    rows: tl.tensor,
    block_table: tl.tensor,
    spans: tl.tensor,
    parts: tl.tensor,
    scaling: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_ceil: tl.constexpr,
    tile_queries: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    is_cut: tl.constexpr,
    split_turns: tl.constexpr,
) -> None:
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile_queries == 1:
        span = tile
        begin = tl.load(query_offsets + span)
        first = 0
    else:
        span = _span_of(tile, query_offsets, spans, tile_queries)
        begin = tl.load(query_offsets + span)
        first = (tile - begin // tile_queries - span) * tile_queries
    count = tl.load(query_offsets + span + 1) - begin
    if first >= count:  # the spare tile
        return
    before = tl.load(kv_lengths + span) - count  # keys before that of the span's first query

    # Row m of the tile is query m // group and head m % group of those that share the keys.
    row = tl.arange(0, tile_rows)
    query = first + row // group
    head = kv_head * group + row % group
    is_row = (row < tile_queries * group) & (query < count)
    place = tl.arange(0, dim_ceil)
    is_place = place < dim
    token = (begin + query).to(tl.int64)
    at = token[:, None] * token_stride + head[:, None] * head_stride + place[None, :]
    query_values = tl.load(queries + at, mask=is_row[:, None] & is_place[None, :], other=0.0)  # (rows, dim)
    position = before + query

    start = 0
    if window > 0:
        start = tl.maximum(before + first - window + 1, 0)
    stop = before + tl.minimum(first + tile_queries, count)
    splits = 1
    if is_cut:
        turns = tl.maximum(tl.cdiv(tl.cdiv(stop - start, parts), tile_keys), split_turns)
        splits = tl.cdiv(stop - start, turns * tile_keys)
        if part >= splits:
            return
        start += part * turns * tile_keys
        stop = tl.minimum(stop, start + turns * tile_keys)

    log2e: tl.constexpr = 1.4426950408889634
    table = block_table + tl.load(rows + span).to(tl.int64) * table_stride
    top = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    weighted = tl.zeros((tile_rows, dim_ceil), tl.float32)
    for turn in range(start, stop, tile_keys):
        key = turn + tl.arange(0, tile_keys)
        is_key = key < stop
        block = tl.load(table + key // block_size, mask=is_key, other=0).to(tl.int64)
        cell = ((block * block_size + key % block_size) * kv_heads + kv_head) * dim
        key_values = tl.load(
            keys + cell[None, :] + place[:, None], mask=is_place[:, None] & is_key[None, :], other=0.0
        )  # (dim, keys)
        score = tl.dot(query_values, key_values, input_precision="ieee") * scaling
        if softcap > 0:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # softcap * tanh(score / softcap)
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            is_seen &= key[None, :] > position[:, None] - window
        score = tl.where(is_seen, score * log2e, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # -inf - -inf is NaN, so a row that has not seen a key yet uses a base of zero.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp2(top - base)
        weight = tl.exp2(score - base[:, None])
        value_values = tl.load(
            values + cell[:, None] + place[None, :], mask=is_key[:, None] & is_place[None, :], other=0.0
        )  # (keys, dim)
        total = total * fading + tl.sum(weight, 1)
        weighted = weighted * fading[:, None] + tl.dot(
            weight.to(value_values.dtype), value_values, input_precision="ieee"
        )
        top = higher

    cell_of_row = token * (kv_heads * group) + head
    is_stored = is_row[:, None] & is_place[None, :]
    if is_cut:  # noqa: SIM102 - decided when it is compiled
        if splits > 1:
            own = cell_of_row * parts + part
            tl.store(tops + own, top, mask=is_row)
            tl.store(totals + own, total, mask=is_row)
            tl.store(sums + own[:, None] * dim + place[None, :], weighted, mask=is_stored)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + tile * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") < splits - 1:
                return
            tl.store(counter, 0)
            top = tl.full((tile_rows,), float("-inf"), tl.float32)
            total = tl.zeros((tile_rows,), tl.float32)
            weighted = tl.zeros((tile_rows, dim_ceil), tl.float32)
            for split in tl.range(0, splits, loop_unroll_factor=4):
                other = cell_of_row * parts + split
                # From the cache that all processors share: others have written it.
                other_top = tl.load(tops + other, mask=is_row, other=float("-inf"), cache_modifier=".cg")
                other_total = tl.load(totals + other, mask=is_row, other=0.0, cache_modifier=".cg")
                other_weighted = tl.load(
                    sums + other[:, None] * dim + place[None, :],
                    mask=is_stored,
                    other=0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(top, other_top)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                fading, share = tl.exp2(top - base), tl.exp2(other_top - base)
                total = total * fading + other_total * share
                weighted = weighted * fading[:, None] + other_weighted * share[:, None]
                top = higher
    # Rows outside the tile have seen no key. Their result is finite and is not stored.
    weighted = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + cell_of_row[:, None] * dim + place[None, :], weighted.to(out.dtype.element_ty), mask=is_stored
    )
