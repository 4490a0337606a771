"""The tensors of one step on this rank: those that its nodes output, and those that they read.

Small tensors are inline in their handles; this module does not manage them. The others are slots of the
worker's store. They are put into the step's scope, and read by a handle whose owner may be any rank. Each is
checked after it was read, and freed as soon as nothing reads it any more. The rest is freed with the scope.

Large tensors are copied in a thread, so that the event loop continues to serve other requests.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from shared.errors import TensorGone
from shared.tensors import Handle
from workers.data_plane.port import Array, Bytes, DeviceArray, PublishOnDevice, Spans, TensorStore
from workers.orders.inbox import StepKey

IN_THREAD_BYTES: Final = 1024 * 1024
"""Tensors above this size are copied in a thread: the copy takes longer than waking the thread."""


Value: TypeAlias = Handle | Array
"""A value of an edge; it may be an array if it never leaves this rank."""


class LostTensor(TensorGone):
    """A tensor of a step is gone.

    Attributes:
        handle: its handle; the key names the step that has to compute it again.
    """

    def __init__(self, handle: Handle, why: str) -> None:
        super().__init__(f"tensor {handle.key} is gone: {why}")
        self.handle = handle


class StepTensors:
    """The tensors of one step.

    Attributes:
        scope: the scope of the step's tensors.
        request_scope: the scope of tensors that outlive the step.
    """

    def __init__(self, store: TensorStore, key: StepKey, rank: int) -> None:
        self.scope = f"{key.request_id}/{key.attempt}/{key.step}"
        self.request_scope = key.request_id
        self._touched = False  # the store may hold tensors of the step
        self._store = store
        self._rank = rank
        self._made: dict[str, Handle] = {}  # own slots of the step's scope, until nothing reads them
        self._lent: dict[str, Handle] = {}  # own slots whose reader, another rank, reports its read
        self._views: dict[str, tuple[Handle, Bytes]] = {}
        self._new: set[str] = set()  # put, and not on an edge yet

    # ---- reading -----------------------------------------------------------------------------------
    async def read(self, handle: Handle) -> Array:
        """Return the tensor of a handle. It is valid if a later `check` succeeds.

        Raises:
            LostTensor: the tensor is gone.
        """
        if handle.data is not None:
            return as_array(handle)
        self._touched = True
        found = self._views.get(handle.key)
        if found is None or found[0] != handle:  # a view belongs to a slot, not to a key
            try:
                found = (handle, await self._store.get(handle))
            except TensorGone as error:
                raise LostTensor(handle, error.message) from error
            self._views[handle.key] = found
        return Array(dtype=handle.dtype, shape=handle.shape, data=found[1])

    async def array(self, value: Value) -> Array:
        """Return a value as an array. It is valid if a later `check` succeeds.

        Raises:
            LostTensor: the tensor is gone.
        """
        return value if isinstance(value, Array) else await self.read(value)

    async def for_engine(self, value: Value) -> Array | DeviceArray:
        """Return a value for an engine, in GPU memory if possible. It is valid if a later `check` succeeds.

        Raises:
            LostTensor: the tensor is gone.
        """
        if isinstance(value, Array):
            return value
        found = self._store.on_device(value)
        if found is None:
            return await self.read(value)
        self._touched = True
        return DeviceArray(
            dtype=found.dtype, shape=found.shape, copy_to=partial(_copy_to, value, found.copy_to)
        )

    async def inline(self, handle: Handle) -> Handle:
        """Return a handle of the same tensor with inline data."""
        if handle.data is not None:
            return handle
        array = await self.read(handle)
        data = await copied(array.data)
        self.check([handle])
        return Handle(key=handle.key, dtype=handle.dtype, shape=handle.shape, data=data)

    def check(self, handles: Iterable[Handle]) -> None:
        """Check that the bytes read by these handles were their tensors'.

        Call it after the read, before any result of it is sent.

        Raises:
            LostTensor: a tensor was freed meanwhile.
        """
        for handle in handles:
            if handle.data is None:
                check(self._store, handle)

    # ---- writing -----------------------------------------------------------------------------------
    async def put(self, key: str, array: Array) -> Handle:
        """Put a tensor into the step's scope; a small one is inline in its handle.

        `keep_only` does not free it before `on_edges` has named it.

        Raises:
            CapacityError: the store is full.
        """
        self._touched = True
        handle = await put(self._store, key, array, self.scope)
        if handle.data is None:
            self._new.add(key)
            self._made[key] = handle
        return handle

    def publisher(self, key: str, readers: Collection[int]) -> PublishOnDevice | None:
        """Return a function that publishes GPU tensors in the step's scope; None without a GPU arena."""
        device = self._store.device
        if device is None or not readers:
            return None
        scope = self.open_scope()

        def publish(dtype: str, shape: tuple[int, ...], source: Spans, stream: int) -> Handle | None:
            return device.put(key, dtype, shape, source, stream, scope=scope, readers=readers)

        return publish

    def note_put(self, handle: Handle) -> Handle:
        """Note a tensor that an engine has published in the step's scope, as `put` does."""
        self._new.add(handle.key)
        self._made[handle.key] = handle
        return handle

    def on_edges(self, handles: Iterable[Handle]) -> None:
        """Note that the walk knows these tensors. From now on `keep_only` frees those that nothing reads."""
        if self._new:
            self._new.difference_update([handle.key for handle in handles])

    def open_scope(self) -> str:
        """Return the step's scope, for a caller that puts tensors into it directly."""
        self._touched = True
        return self.scope

    def lend(self, handle: Handle) -> None:
        """Note a slot for another rank. It is freed when that rank has read it, or with the step."""
        if handle.data is None:
            self._lent[handle.key] = handle

    def returned(self, keys: Iterable[str]) -> None:
        """Free slots that another rank has read."""
        for key in keys:
            if (handle := self._lent.pop(key, None)) is not None:
                self._store.release(handle)

    async def keep(self, handle: Handle) -> Handle:
        """Let a tensor outlive the step. A tensor of another rank is copied: its owner may free it.

        Raises:
            LostTensor: the tensor is gone.
        """
        if handle.data is not None:
            return handle
        if handle.rank == self._rank and self._store.on_device(handle) is not None:
            # A later reader may be a rank that CUDA IPC does not reach.
            array = await self.read(handle)
            return await put(self._store, handle.key, array, self.request_scope)
        if self._made.pop(handle.key, None) is not None:
            self._store.keep(handle, scope=self.request_scope)
            return handle
        if handle.rank == self._rank:
            return handle  # an earlier step kept it
        array = await self.read(handle)
        kept = await put(self._store, handle.key, array, self.request_scope)
        self.check([handle])
        return kept

    # ---- release -----------------------------------------------------------------------------------
    @property
    def holds(self) -> bool:
        """True if there is something to release."""
        return bool(self._made or self._views)

    def keep_only(self, keys: Collection[str]) -> None:
        """Free and forget the tensors that are not among `keys`: nothing reads them any more."""
        for key in [key for key in self._views if key not in keys]:
            handle, _ = self._views.pop(key)
            if handle.rank != self._rank:
                self._store.release(handle)
        for key in [key for key in self._made if key not in keys and key not in self._new]:
            self._store.release(self._made.pop(key))

    def close(self) -> None:
        """Free all tensors of the step."""
        if not self._touched:
            return
        self._new.clear()
        self.keep_only(())
        self._lent.clear()
        self._store.end(self.scope)


def _copy_to(handle: Handle, copy_to: Callable[[Spans, int], None], into: Spans, stream: int) -> None:
    try:
        copy_to(into, stream)
    except TensorGone as error:
        raise LostTensor(handle, error.message) from error


def check(store: TensorStore, handle: Handle) -> None:
    """Check that a view still shows the tensor. Thread-safe: engines' threads call it, too.

    Raises:
        LostTensor: the tensor was freed.
    """
    try:
        store.check(handle)
    except TensorGone as error:
        raise LostTensor(handle, error.message) from error


async def put(store: TensorStore, key: str, array: Array, scope: str) -> Handle:
    """Copy a tensor into a scope."""
    if array.data.nbytes <= IN_THREAD_BYTES:
        return store.put(key, array.dtype, array.shape, array.data, scope=scope)
    return await asyncio.to_thread(store.put, key, array.dtype, array.shape, array.data, scope=scope)


async def copied(data: Bytes) -> bytes:
    """Return a copy of the bytes."""
    return data.tobytes() if data.nbytes <= IN_THREAD_BYTES else await asyncio.to_thread(data.tobytes)


async def as_inline(key: str, array: Array) -> Handle:
    """Return a handle with inline data, of any size."""
    return Handle(key=key, dtype=array.dtype, shape=array.shape, data=await copied(array.data))


def as_array(handle: Handle) -> Array:
    """Return the tensor of a handle with inline data."""
    assert handle.data is not None
    return Array(dtype=handle.dtype, shape=handle.shape, data=np.frombuffer(handle.data, dtype=np.uint8))
