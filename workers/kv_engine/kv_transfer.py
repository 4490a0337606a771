"""A sequence's keys and values on their way out of one engine's pool and into another's.

One tensor, (layers, 2, tokens, kv_heads, head_dim): keys, then values, in the order of the text, without
blocks: the other pool may have other ones. Layers with a sliding window are handed on whole, as the pool
keeps them.
"""

from typing import Protocol

import torch

from models.base import KVLayout
from shared.errors import WorkerError
from shared.tensors import Handle
from workers.data_plane.arrays import borrowed, dtype_name
from workers.data_plane.port import Array, Bytes
from workers.kv_engine.attention.pool import PagedPool


class Allocate(Protocol):
    """A slot to copy into (`TensorStore.allocate`)."""

    def __call__(
        self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str
    ) -> tuple[Handle, Bytes]: ...


class KVMismatchError(WorkerError):
    """Keys and values that do not fit this engine's pool."""

    code = "kv_mismatch"


def check_kv(array: Array, layout: KVLayout, dtype: torch.dtype, longest: int) -> None:
    """Whether such keys and values can be copied in.

    Raises:
        KVMismatchError: they are of another layout or dtype, or of more tokens than the sequence has.
    """
    expected = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    found = array.shape[:2] + array.shape[3:] if len(array.shape) == 5 else array.shape
    if array.dtype != dtype_name(dtype) or found != expected:
        layers, both, kv_heads, head_dim = expected
        raise KVMismatchError(
            f"keys and values are handed on as {array.dtype}{list(array.shape)}: expected "
            f"{dtype_name(dtype)}[{layers}, {both}, tokens, {kv_heads}, {head_dim}]; the ranks of a node "
            "must have one checkpoint and one model_kwargs.dtype"
        )
    if array.shape[2] > longest:
        raise KVMismatchError(
            f"keys and values of {array.shape[2]} tokens are handed on: expected at most {longest}, which is "
            "all the sequence has"
        )
    try:
        borrowed(array)
    except ValueError as error:
        raise KVMismatchError(
            f"keys and values that are handed on do not fit their shape: {error}"
        ) from error


def export_kv(pool: PagedPool, cells: torch.Tensor, into: Array) -> None:
    """Copy the keys and values in `cells` of the pool, (tokens,) int64, out of every layer."""
    out = borrowed(into)
    for layer, both in enumerate(zip(pool.keys, pool.values, strict=True)):
        for place, cache in enumerate(both):
            if out.device == cache.device:
                torch.index_select(cache, 0, cells, out=out[layer, place])
            else:
                out[layer, place].copy_(cache.index_select(0, cells))


def import_kv(pool: PagedPool, cells: torch.Tensor, array: Array) -> None:
    """Copy keys and values into `cells` of the pool, (tokens,) int64, of every layer."""
    given = borrowed(array)
    for layer, both in enumerate(zip(pool.keys, pool.values, strict=True)):
        for place, cache in enumerate(both):
            cache.index_copy_(0, cells, given[layer, place].to(cache.device))
