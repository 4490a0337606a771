"""Transfer of a sequence's keys and values between the pools of two engines.

The format is one tensor, (layers, 2, tokens, kv_heads, head_dim): keys, then values, in token order and
without blocks, for the other pool may have another block size. Layers with a sliding window are transferred
whole, as the pool keeps them. Where layers differ (`models.base.KVLayout.cells`), it is (numbers per token,
tokens) with the same content: layer after layer, the keys of all tokens, then their values, if the layer
stores any.

With recurrent states it is (1, tokens, numbers): that content, then the bytes of the states after the last of
these tokens, layer after layer, then zeros up to a multiple of the number of tokens.

A tensor-parallel group transfers what a single rank would (`workers.kv_engine.parallel.shared_cells`).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch

from models.base import KVLayout
from shared.errors import BugError, DalSegnoError, WorkerError
from shared.tensors import Handle
from workers.data_plane.arrays import borrowed, dtype_name, stream_of, to_tensor
from workers.data_plane.port import Array, Bytes, DeviceArray
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import Backbone, kv_dtype_of
from workers.kv_engine.outputs import as_dalsegno_error
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import Followers
from workers.kv_engine.parallel.shared_cells import SharedCells, whole_layout
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import tokens_in


class Allocate(Protocol):
    """Allocation of a slot for an exported tensor (`TensorStore.allocate`)."""

    def __call__(
        self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str
    ) -> tuple[Handle, Bytes]: ...


class KVMismatchError(WorkerError):
    """Keys and values do not fit this engine's pool."""

    code = "kv_mismatch"


class KVTransfer:
    """Import and export of keys and values between `pool` and the tensor store.

    `export_to` allocates the slots for exports; None if the engine exports nothing. `followers` are the other
    ranks of a TP group.
    """

    def __init__(
        self,
        node: Backbone,
        pool: PagedPool,
        *,
        block_size: int,
        export_to: Allocate | None,
        followers: Followers | None = None,
    ) -> None:
        others = () if followers is None else followers.connections
        self._shared = SharedCells(pool, node.layout, others) if others else None
        self._layout: Final = whole_layout(node.layout, 1 + len(others))
        self._dtype: Final = kv_dtype_of(node)
        self._device: Final = node.device
        self._pool = pool
        self._block_size = block_size
        self._export_to = export_to

    def check(self, sequence: Sequence) -> None:
        """Check the import and the export that a sequence requests.

        Raises:
            BugError: the worker built an inconsistent request.
            KVMismatchError: the keys and values to import do not fit the pool.
        """
        spec = sequence.spec
        if spec.export is not None and self._export_to is None:
            raise BugError(f"sequence {spec.key!r} has an export, but the engine has no store for it")
        if spec.export is not None and spec.max_tokens == 0:
            raise BugError(f"sequence {spec.key!r} has an export, but generates no token")
        if spec.kv is None:
            return
        if spec.scores_prompt:
            raise BugError(f"sequence {spec.key!r} has scores_prompt, but imports keys and values")
        # A state cannot be cut, and the last token is computed here.
        longest = len(sequence.ids) - 1 if self._layout.states else len(sequence.ids)
        check_kv(spec.kv, self._layout, self._dtype, longest=longest)

    @torch.inference_mode()
    def import_all(self, sequences: Iterable[Sequence]) -> dict[str, DalSegnoError]:
        """Copy the keys and values that the sequences bring into their blocks; return the failures by key."""
        failures: dict[str, DalSegnoError] = {}
        for sequence in sequences:
            spec = sequence.spec
            if spec.kv is None:
                continue
            try:
                if sequence.imported:
                    self._import(sequence, spec.kv)
                if spec.on_kv_read is not None:
                    spec.on_kv_read()
            except GroupLostError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the bytes are, only this sequence fails
                failures[spec.key] = as_dalsegno_error(error)
            # Drop the reference: after `on_kv_read` the memory may be reused for another tensor.
            sequence.spec = replace(spec, kv=None, on_kv_read=None)
        return failures

    def _import(self, sequence: Sequence, kv: Array | DeviceArray) -> None:
        cells = self._cells(sequence, tokens_in(kv.shape))
        if self._shared is not None:
            self._shared.write(cells, [*_planes_in(kv, self._layout, self._device)])
        else:
            import_kv(self._pool, cells, kv, row=sequence.row)

    @torch.inference_mode()
    def export(self, sequence: Sequence) -> Handle | None:
        """Export the keys and values of a finished sequence, if requested; it must still have its blocks."""
        export = sequence.spec.export
        if export is None:
            return None
        assert self._export_to is not None, "checked when the sequence was added"
        dtype = dtype_name(self._dtype)
        shape = shape_of(self._layout, sequence.computed, itemsize=self._dtype.itemsize)
        cells = self._cells(sequence, sequence.computed)
        if export.publish is not None and self._shared is None:
            nbytes = math.prod(shape) * self._dtype.itemsize
            source = _planes(self._pool, cells, sequence.row, nbytes)
            if (handle := export.publish(dtype, shape, source, stream_of(self._device))) is not None:
                return handle
        handle, data = self._export_to(export.key, dtype, shape, scope=export.scope)
        into = Array(dtype=dtype, shape=shape, data=data)
        if self._shared is not None:
            planes = _planes_in(into, self._layout, torch.device("cpu"))
            for plane, found in zip(planes, self._shared.read(cells), strict=True):
                plane.copy_(found)
        else:
            export_kv(self._pool, cells, into, row=sequence.row)
        return handle

    def _cells(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        """Return the pool's cells of a sequence's first tokens, (tokens,) int64."""
        size = self._block_size
        cells = (np.array(sequence.blocks, np.int64)[:, None] * size + np.arange(size)).ravel()
        return torch.from_numpy(cells[:tokens]).to(self._device)


def check_kv(array: Array | DeviceArray, layout: KVLayout, dtype: torch.dtype, longest: int) -> None:
    """Check that keys and values fit a pool, and a sequence of `longest` tokens.

    Raises:
        KVMismatchError: the layout or dtype differs, there are too many tokens, or the bytes do not fit the
        shape.
    """
    tokens = tokens_in(array.shape)
    shape = shape_of(layout, tokens, itemsize=dtype.itemsize)
    if array.dtype != dtype_name(dtype) or array.shape != shape:
        expected = [str(size) for size in shape]
        expected[_AXIS_OF_TOKENS[len(shape)]] = "tokens"
        raise KVMismatchError(
            f"imported keys and values are {array.dtype}{list(array.shape)}: expected "
            f"{dtype_name(dtype)}[{', '.join(expected)}]; all ranks of a node "
            "need the same checkpoint, model_kwargs.dtype and kv_cache"
        )
    if tokens > longest:
        raise KVMismatchError(
            f"imported keys and values have {tokens} tokens: expected at most {longest}, "
            "the length of the sequence"
        )
    if isinstance(array, DeviceArray):
        return
    try:
        borrowed(array)
    except ValueError as error:
        raise KVMismatchError(f"imported keys and values do not fit their shape: {error}") from error


_AXIS_OF_TOKENS: Final = {5: 2, 2: 1, 3: 1}
"""The axis of the tokens in a shape of so many dimensions."""


def shape_of(layout: KVLayout, tokens: int, *, itemsize: int) -> tuple[int, ...]:
    """The shape of transferred keys and values, and states, of a sequence of so many tokens.

    `itemsize` is the bytes of a number of keys and values.
    """
    if layout.states:
        numbers = layout.numbers * tokens + -(-layout.state_bytes(itemsize) // itemsize)
        return (1, tokens, -(-numbers // max(tokens, 1)))
    if layout.cells:
        return (layout.numbers, tokens)
    return (layout.layers, 2, tokens, layout.kv_heads, layout.head_dim)


def export_kv(pool: PagedPool, cells: torch.Tensor, into: Array, *, row: int | None = None) -> None:
    """Copy the keys and values in `cells` of the pool, (tokens,) int64, out of every layer.

    `row` is the slot of the sequence's recurrent states, if it has any.
    """
    numbers = borrowed(into)
    for plane, cache in _paired(pool, len(cells), numbers):
        if plane.device == cache.device:
            torch.index_select(cache, 0, cells, out=plane)
        else:
            plane.copy_(cache.index_select(0, cells))
    for part, state in _paired_states(pool, len(cells), numbers, row):
        part.copy_(state.flatten().view(torch.uint8))


def _planes(pool: PagedPool, cells: torch.Tensor, row: int | None, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield pointer and length of the keys and of the values of each layer, in `cells` of the pool.

    Then those of the states in slot `row`, and of zeros up to `nbytes`. A copy that is launched on the
    current stream before the next one is taken reads the right bytes.
    """
    for cache in pool.by_layer():
        plane = cache.index_select(0, cells)
        nbytes -= plane.nbytes
        yield plane.data_ptr(), plane.nbytes
    for state in _states_in(pool, row):
        plane = state.contiguous()
        nbytes -= plane.nbytes
        yield plane.data_ptr(), plane.nbytes
    if nbytes:
        rest = torch.zeros(nbytes, dtype=torch.uint8, device=cells.device)
        yield rest.data_ptr(), nbytes


def import_kv(
    pool: PagedPool, cells: torch.Tensor, array: Array | DeviceArray, *, row: int | None = None
) -> None:
    """Copy keys and values into `cells` of the pool, (tokens,) int64, of every layer.

    `row` is the slot of the sequence's recurrent states, if it has any.
    """
    given = to_tensor(array, pool.keys[0].device) if isinstance(array, DeviceArray) else borrowed(array)
    for plane, cache in _paired(pool, len(cells), given):
        cache.index_copy_(0, cells, plane.to(cache.device))
    for part, state in _paired_states(pool, len(cells), given, row):
        # A copy: the bytes need not lie where numbers of 4 bytes may.
        state.copy_(part.clone().view(state.dtype).view(state.shape))


def _planes_in(array: Array | DeviceArray, layout: KVLayout, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield each stored tensor's part of transferred keys and values, (tokens, heads, numbers)."""
    given = to_tensor(array, device) if isinstance(array, DeviceArray) else borrowed(array)
    numbers, at, tokens = given.view(-1), 0, tokens_in(array.shape)
    for shape in layout.shapes:
        for width in (shape.key,) if shape.is_latent else (shape.key, shape.value):
            size = tokens * shape.heads * width
            yield numbers[at : at + size].view(tokens, shape.heads, width)
            at += size


def _paired(
    pool: PagedPool, tokens: int, transferred: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the part of each stored tensor in transferred keys and values, (tokens, ...), and the tensor."""
    numbers, at = transferred.view(-1), 0
    for cache in pool.by_layer():
        size = tokens * cache.shape[1:].numel()
        yield numbers[at : at + size].view(tokens, *cache.shape[1:]), cache
        at += size


def _states_in(pool: PagedPool, row: int | None) -> Iterator[torch.Tensor]:
    """Yield the recurrent states in a slot, layer by layer; nothing of a pool without any."""
    if pool.states is not None:
        assert row is not None, "a sequence that runs has a row"
        yield from pool.states.in_slot(row)


def _paired_states(
    pool: PagedPool, tokens: int, transferred: torch.Tensor, row: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of each state behind transferred keys and values, and the state in slot `row`."""
    if not tokens:  # nothing was computed, so there is no state
        return
    numbers = sum(cache.shape[1:].numel() for cache in pool.by_layer()) * tokens
    behind = transferred.view(-1)[numbers:].view(torch.uint8)
    for state in _states_in(pool, row):
        yield behind[: state.nbytes], state
        behind = behind[state.nbytes :]
