"""Attention over the paged pool: the one function every layer of every model goes through.

Transformers' modelling code hands each layer's queries, keys and values to whatever function is
registered under the model's attention implementation. Ours writes keys and values into the pool's
slots and lets each span attend to its own history there. What differs from step to step comes by a
thread-local context, not through the model: some models drop keyword arguments on the way.

Spans of like shape are computed together, padded; how they are grouped is worked out once per step and
shared by all layers. Padding points at cells of the same span, so no sequence ever reads another's.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shared.errors import BugError
from workers.engine.step import Spans, Step

ATTENTION: Final = "dalsegno_paged"
"""The name it is registered under."""

_FREE_CELLS: Final = 4096
"""Padding of so many query-key pairs costs less than one more call per layer."""


class PagedPool:
    """Keys and values of every layer: `slots` cells of `kv_heads` x `head_dim`."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        self.keys: Final = _zeros(shape, device, dtype).unbind()
        self.values: Final = _zeros(shape, device, dtype).unbind()


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on a CPU of pages that are there only when they are used.

    `torch.zeros` touches every page: 12 s for 5 GiB on a virtual machine, and the memory is gone at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Spans computed in one call: B of them, with at most Q queries and L keys each; N tokens in all.

    `queries` and `kept` are None where each span has one query: nothing is padded there then.
    """

    spans: int
    tokens: torch.Tensor  # (N,) int64, which of the packed tokens are its own, ascending
    queries: torch.Tensor | None  # (B * Q,) int64, packed tokens; padding repeats a span's last
    kept: torch.Tensor | None  # (N,) int64, which of the B * Q are no padding
    slots: torch.Tensor  # (B * L,) int64
    mask: torch.Tensor  # (B, 1, Q, L), added to the scores


@dataclass(frozen=True, slots=True)
class _Context:
    pool: PagedPool
    slots: torch.Tensor  # (T,) int64
    groups: Sequence[Group]


_thread: Final = local()


@contextmanager
def attending(pool: PagedPool, step: Step) -> Iterator[None]:
    """In this thread, attention reads and writes `pool` as `step` says."""
    groups = group_spans(step.spans, device=step.slots.device, dtype=pool.keys[0].dtype)
    _thread.context = _Context(pool, step.slots.long(), groups)
    try:
        yield
    finally:
        _thread.context = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, K, T, D)
    value: torch.Tensor,  # (1, K, T, D)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What `AttentionInterface` calls; its `kwargs` were examined when the checkpoint was loaded."""
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        raise BugError("paged attention was called outside of an engine step")
    layer: Any = module.layer_idx
    keys, values = context.pool.keys[layer], context.pool.values[layer]  # (slots, K, D)
    keys.index_copy_(0, context.slots, key[0].transpose(0, 1))
    values.index_copy_(0, context.slots, value[0].transpose(0, 1))

    queries = query[0].transpose(0, 1)  # (T, H, D)
    if len(context.groups) == 1:  # its tokens are all of them, in order
        return _attend(queries, keys, values, context.groups[0], scaling)[None], None
    out = queries.new_empty(queries.shape)
    for group in context.groups:
        out.index_copy_(0, group.tokens, _attend(queries, keys, values, group, scaling))
    return out[None], None


AttentionInterface.register(ATTENTION, paged_attention)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scaling: float | None
) -> torch.Tensor:
    """The group's attention: from (T, H, D) its (N, H, D)."""
    slots, kv_heads, dim = keys.shape
    # Gathering whole cells as flat rows is five times faster than indexing (CPU, 512 x 2 x 64).
    history = (group.spans, -1, kv_heads, dim)
    k = keys.view(slots, -1).index_select(0, group.slots).view(history).transpose(1, 2)  # (B, K, L, D)
    v = values.view(slots, -1).index_select(0, group.slots).view(history).transpose(1, 2)
    if group.queries is None or group.kept is None:
        # One query per span: the heads that share a KV head stand where the queries would. Half the
        # time of `enable_gqa`.
        q = queries.index_select(0, group.tokens).view(group.spans, kv_heads, -1, dim)
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        return out.reshape(group.spans, -1, dim)
    q = (
        queries.index_select(0, group.queries).view(group.spans, -1, *queries.shape[1:]).transpose(1, 2)
    )  # (B, H, Q, D)
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, group.kept)


def group_spans(spans: Spans, *, device: torch.device, dtype: torch.dtype) -> list[Group]:
    """Which spans of a step are computed together."""
    return [_group(spans, members, device, dtype) for members in partition(spans)]


def partition(spans: Spans) -> list[list[int]]:
    """The spans' indices, in groups: alike enough that a quarter of the work at most is padding."""
    counts = np.diff(spans.query_offsets).tolist()
    lengths = spans.kv_lengths.tolist()
    parts: list[list[int]] = []
    queries = keys = work = 0
    for index in sorted(range(len(counts)), key=lambda i: (counts[i], lengths[i]), reverse=True):
        count, length = counts[index], lengths[index]
        longest = max(keys, length)
        padding = (len(parts[-1]) + 1) * queries * longest - work - count * length if parts else 0
        # Spans of one query are computed in their own way.
        is_alike = bool(parts) and (count > 1) == (queries > 1)
        if is_alike and padding <= _FREE_CELLS + (work + count * length) // 4:
            parts[-1].append(index)
            keys, work = longest, work + count * length
            continue
        parts.append([index])
        queries, keys, work = count, length, count * length
    return [sorted(part) for part in parts]


def _group(spans: Spans, members: list[int], device: torch.device, dtype: torch.dtype) -> Group:
    starts, ends = spans.query_offsets[:-1][members], spans.query_offsets[1:][members]
    counts, lengths = ends - starts, spans.kv_lengths[members]
    # (B, L): padding repeats a span's last cell.
    cells = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    blocks = np.take_along_axis(spans.block_tables[members], cells // spans.block_size, axis=1)
    # (B, Q): padding repeats a span's last query.
    ordinals = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    seen = (lengths - counts)[:, None] + ordinals
    visible = np.arange(lengths.max()) <= seen[:, :, None]  # (B, Q, L)

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    queries = starts[:, None] + ordinals
    is_kept = np.arange(counts.max()) < counts[:, None]
    is_single = bool(counts.max() == 1)
    return Group(
        spans=len(members),
        tokens=on_device(queries[is_kept].astype(np.int64)),
        queries=None if is_single else on_device(queries.astype(np.int64).ravel()),
        kept=None if is_single else on_device(np.flatnonzero(is_kept)),
        slots=on_device((blocks * np.int64(spans.block_size) + cells % spans.block_size).ravel()),
        mask=torch.zeros((), dtype=dtype, device=device).where(on_device(visible), float("-inf"))[:, None],
    )
