"""Groups of spans that torch's attention computes in one padded call.

`group_spans` makes the groups of a step, once for all layers with the same window. Spans share a group if
padding them to one shape adds little work. Padding repeats a cell or a query of the same span, so no
sequence ever reads another's keys. Each query sees one range of keys (`Step.key_ends`).

A *whole* span is one whose tokens all see all of its keys, such as the latents of an image. Whole spans of
one shape need no mask: one for an image of 1024 x 1024 has 17 million entries, and keeps torch from using its
fastest kernel.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from workers.kv_engine.step import Int32s, Spans

_FREE_PADDING: Final = 4096
"""Up to this many padded query-key pairs cost less than one more call per layer."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The keys before its own that a token of a layer sees: the last `window`, or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def first_keys(self, places: Int32s) -> Int32s:
        """The first key seen from each place; it may be negative, where all are seen."""
        if self.chunk is not None:
            return places - places % self.chunk
        assert self.window is not None, "all keys are seen"
        return places - self.window + 1


ALL: Final = Sight()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """B spans computed in one call, with at most Q queries and L keys each; N tokens in total.

    `queries` and `kept` are None if each span has one query: then there is no padding.
    """

    spans: int
    tokens: torch.Tensor  # (N,) int64, packed tokens of the group, ascending
    queries: torch.Tensor | None  # (B * Q,) int64, packed tokens; padding repeats a span's last
    kept: torch.Tensor | None  # (N,) int64, the entries of B * Q that are not padding
    slots: torch.Tensor  # (B * L,) int64
    mask: torch.Tensor | None  # (B, 1, Q, L), added to the scores; None: every query sees all keys


def group_spans(
    spans: Spans,
    window: int | None = None,
    *,
    chunk: int | None = None,
    device: torch.device,
    dtype: torch.dtype,
    among: Collection[int] | None = None,
) -> list[Group]:
    """Return the groups of a step, for layers that see the last `window` keys (None: all keys).

    In layers with a `chunk`, tokens see the keys of their own range of so many places. `among` are the
    indices of the spans to group; None: all.
    """
    sight = Sight(window, chunk)
    parts = partition(spans, sight, among)
    return [_make_group(spans, members, sight, device, dtype) for members in parts]


def _first_keys(spans: Spans, sight: Sight) -> Int32s:
    """The first key that any query of each span sees: (B,)."""
    least = np.zeros_like(spans.kv_lengths) if spans.first_keys is None else spans.first_keys
    if sight == ALL:
        return least
    firsts = sight.first_keys(spans.kv_lengths - np.diff(spans.query_offsets))
    if spans.full_starts is not None:
        firsts = np.minimum(firsts, np.minimum.reduceat(spans.full_starts, spans.query_offsets[:-1]))
    return np.maximum(firsts, least)


def partition(spans: Spans, sight: Sight = ALL, among: Collection[int] | None = None) -> list[list[int]]:
    """Return the groups as lists of span indices; padding is about a quarter of a group's work at most."""
    counts = np.diff(spans.query_offsets).tolist()
    lengths = (spans.kv_lengths - _first_keys(spans, sight)).tolist()
    whole = _whole_spans(spans, sight)
    parts: list[list[int]] = []
    queries = keys = work = 0
    members = range(len(counts)) if among is None else among
    for index in sorted(members, key=lambda i: (counts[i], lengths[i]), reverse=True):
        count, length = counts[index], lengths[index]
        longest = max(keys, length)
        padding = (len(parts[-1]) + 1) * queries * longest - work - count * length if parts else 0
        # Spans of one query have a faster path, so they are not mixed with others.
        is_alike = bool(parts) and (count > 1) == (queries > 1)
        # Padding would cost whole spans their kernel without a mask.
        allowed = 0 if parts and (whole[index] or whole[parts[-1][0]]) else (work + count * length) // 4
        if is_alike and padding <= _FREE_PADDING + allowed:
            parts[-1].append(index)
            keys, work = longest, work + count * length
            continue
        parts.append([index])
        queries, keys, work = count, length, count * length
    return [sorted(part) for part in parts]


def _whole_spans(spans: Spans, sight: Sight) -> list[bool]:
    """True for each span whose tokens, several, all see all of its keys."""
    if spans.key_ends is None or sight != ALL:
        return [False] * len(spans.kv_lengths)
    ends = np.minimum.reduceat(spans.key_ends, spans.query_offsets[:-1])
    found: list[bool] = ((ends == spans.kv_lengths) & (np.diff(spans.query_offsets) > 1)).tolist()
    return found


def _make_group(
    spans: Spans, members: list[int], sight: Sight, device: torch.device, dtype: torch.dtype
) -> Group:
    starts, ends = spans.query_offsets[:-1][members], spans.query_offsets[1:][members]
    counts, lengths = ends - starts, spans.kv_lengths[members]
    firsts = _first_keys(spans, sight)[members]
    # (B, L): padding repeats the span's last slot.
    places = firsts[:, None] + np.arange((lengths - firsts).max())
    cells = np.minimum(places, lengths[:, None] - 1)
    blocks = np.take_along_axis(spans.block_tables[members], cells // spans.block_size, axis=1)
    # (B, Q): padding repeats the span's last query.
    ordinals = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    queries = starts[:, None] + ordinals
    whole = _whole_spans(spans, sight)
    needs_mask = not all(whole[index] for index in members) or len(set(lengths.tolist())) > 1

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    is_kept = np.arange(counts.max()) < counts[:, None]
    is_single = bool(counts.max() == 1)
    return Group(
        spans=len(members),
        tokens=on_device(queries[is_kept].astype(np.int64)),
        queries=None if is_single else on_device(queries.astype(np.int64).ravel()),
        kept=None if is_single else on_device(np.flatnonzero(is_kept)),
        slots=on_device((blocks * np.int64(spans.block_size) + cells % spans.block_size).ravel()),
        mask=_mask(spans, members, queries, places, sight, device, dtype) if needs_mask else None,
    )


def _mask(
    spans: Spans,
    members: list[int],
    queries: Int32s,
    places: Int32s,
    sight: Sight,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The mask of a group, (B, 1, Q, L), by its packed `queries` (B, Q) and the `places` of keys (B, L)."""
    starts = spans.kv_lengths - spans.query_offsets[1:]  # of a packed token's index to its place
    own = queries + starts[members][:, None]  # the place of each query in its sequence
    key_ends = own + 1 if spans.key_ends is None else spans.key_ends[queries]
    visible = places[:, None, :] < key_ends[:, :, None]  # (B, Q, L)
    if sight != ALL:
        key_starts = sight.first_keys(own)
        if spans.full_starts is not None:
            key_starts = np.minimum(key_starts, spans.full_starts[queries])
        visible &= places[:, None, :] >= key_starts[:, :, None]
    zero = torch.zeros((), dtype=dtype, device=device)
    return zero.where(torch.from_numpy(visible).to(device), float("-inf"))[:, None]
