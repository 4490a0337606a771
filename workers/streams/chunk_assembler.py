"""Assembly of stream chunks: the items of several batches are copied into one array.

Items come as arrays, inline in an event, or as handles of a tensor store, possibly another rank's. A tensor
is read from the store once, however many chunks share it, and is released when no chunk needs it any more.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from shared.errors import BugError, TensorGone
from shared.tensors import Handle
from workers.data_plane.port import Array, Bytes, TensorStore
from workers.data_plane.step_tensors import IN_THREAD_BYTES, LostTensor, check
from workers.streams.consumer import ItemBatch, Items

_TOKEN: Final[tuple[str, tuple[int, ...]]] = ("int32", ())
"""The item type of a stream that ended without any item."""


class ChunkAssembler:
    """Joins item batches into arrays, with the tensors of one attempt's streams."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._views: dict[str, tuple[Handle, Bytes]] = {}  # by tensor key; the handle keeps the view valid

    async def join(
        self,
        parts: Sequence[tuple[ItemBatch, int, int]],
        item_type: tuple[str, tuple[int, ...]] | None,
    ) -> Array:
        """Copy parts (batch, start, stop) into one array, in order; without parts, return an empty array.

        Raises:
            LostTensor: a batch's tensor is gone.
            BugError: the batches differ in dtype or item shape.
        """
        if not parts:
            dtype, shape = item_type or _TOKEN
            return Array(dtype=dtype, shape=(0, *shape), data=np.empty(0, dtype=np.uint8))
        kinds = {(batch.items.dtype, batch.items.shape[1:]) for batch, _, _ in parts}
        if len(kinds) > 1:
            raise BugError(
                "stream items: expected one dtype and shape for the whole stream, "
                f"found {sorted(map(str, kinds))}"
            )
        [(dtype, shape)] = kinds
        views: list[Bytes] = []
        for batch, start, stop in parts:
            data = await self._bytes(batch.items)
            size = data.nbytes // batch.count
            views.append(data[start * size : stop * size])
        is_large = sum(view.nbytes for view in views) > IN_THREAD_BYTES
        joined = await asyncio.to_thread(np.concatenate, views) if is_large else np.concatenate(views)
        for batch, _, _ in parts:
            if isinstance(batch.items, Handle) and batch.items.data is None:
                check(self._store, batch.items)
        count = sum(stop - start for _, start, stop in parts)
        return Array(dtype=dtype, shape=(count, *shape), data=joined)

    def release(self, batches: Iterable[ItemBatch]) -> None:
        """Release the tensors of batches that no chunk needs any more."""
        for batch in batches:
            if isinstance(batch.items, Handle) and self._views.pop(batch.items.key, None) is not None:
                self._store.release(batch.items)

    async def _bytes(self, items: Items) -> Bytes:
        if isinstance(items, Array):
            return items.data
        if items.data is not None:
            return np.frombuffer(items.data, dtype=np.uint8)
        if items.key not in self._views:
            try:
                self._views[items.key] = (items, await self._store.get(items))
            except TensorGone as error:
                raise LostTensor(items, error.message) from error
        return self._views[items.key][1]
