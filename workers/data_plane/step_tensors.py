"""One step's tensors on this rank: what its nodes made, and what they read.

Small ones ride in their handles, and nothing here touches them. The others are slots of the worker's store:
made in the step's scope, looked at by a handle whose owner may be any rank, checked once they were read, and
freed as soon as nothing can read them any more; what is left goes with the scope.

What is copied and large is copied in a thread: the event loop has other requests' tokens to bring home.
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
"""More than that is copied in a thread: it takes longer than waking one."""


Value: TypeAlias = Handle | Array
"""What travels on an edge; what never leaves this rank may be an array."""


class LostTensor(TensorGone):
    """A tensor of a step is gone.

    Attributes:
        handle: where it was; its key says which step has to make it again.
    """

    def __init__(self, handle: Handle, why: str) -> None:
        super().__init__(f"tensor {handle.key} is gone: {why}")
        self.handle = handle


class StepTensors:
    """Tensors of one step.

    Attributes:
        scope: theirs, and `request_scope` that of what outlives the step.
    """

    def __init__(self, store: TensorStore, key: StepKey, rank: int) -> None:
        self.scope = f"{key.request_id}/{key.attempt}/{key.step}"
        self.request_scope = key.request_id
        self._touched = False  # the store may have something of the step
        self._store = store
        self._rank = rank
        self._made: dict[str, Handle] = {}  # own slots of the step's scope, until nothing reads them
        self._lent: dict[str, Handle] = {}  # own slots that another rank says when it has read
        self._looks: dict[str, tuple[Handle, Bytes]] = {}
        self._new: set[str] = set()  # made, and not on an edge yet

    # ---- reading -----------------------------------------------------------------------------------
    async def read(self, handle: Handle) -> Array:
        """The tensor behind a handle; good until `check` says otherwise.

        Raises:
            LostTensor: it is gone.
        """
        if handle.data is not None:
            return as_array(handle)
        self._touched = True
        found = self._looks.get(handle.key)
        if found is None or found[0] != handle:  # a look is at a slot, whatever its name
            try:
                found = (handle, await self._store.get(handle))
            except TensorGone as error:
                raise LostTensor(handle, error.message) from error
            self._looks[handle.key] = found
        return Array(dtype=handle.dtype, shape=handle.shape, data=found[1])

    async def array(self, value: Value) -> Array:
        """A value as an array; good until `check` says otherwise.

        Raises:
            LostTensor: it is gone.
        """
        return value if isinstance(value, Array) else await self.read(value)

    async def for_engine(self, value: Value) -> Array | DeviceArray:
        """Return a value for an engine: in GPU memory if it is there; good until `check` says otherwise.

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
        """The same tensor with its bytes in the handle."""
        if handle.data is not None:
            return handle
        array = await self.read(handle)
        data = await copied(array.data)
        self.check([handle])
        return Handle(key=handle.key, dtype=handle.dtype, shape=handle.shape, data=data)

    def check(self, handles: Iterable[Handle]) -> None:
        """Whether what was read of these was theirs: to be asked before anything that came of it is told.

        Raises:
            LostTensor: one was freed meanwhile.
        """
        for handle in handles:
            if handle.data is None:
                check(self._store, handle)

    # ---- making ------------------------------------------------------------------------------------
    async def put(self, key: str, array: Array) -> Handle:
        """Put a tensor into the step's scope; a small one rides in its handle.

        It stays, whatever is let go of, until it is said to be on its edge.

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
        """The walk knows these now, and says when nothing reads them any more."""
        if self._new:
            self._new.difference_update([handle.key for handle in handles])

    def open_scope(self) -> str:
        """The step's scope, for whoever puts a tensor into it past this."""
        self._touched = True
        return self.scope

    def lend(self, handle: Handle) -> None:
        """A slot that was made for another rank: it is free once that says so, or with the step."""
        if handle.data is None:
            self._lent[handle.key] = handle

    def returned(self, keys: Iterable[str]) -> None:
        """Another rank has read these."""
        for key in keys:
            if (handle := self._lent.pop(key, None)) is not None:
                self._store.release(handle)

    async def keep(self, handle: Handle) -> Handle:
        """Let a tensor outlive the step; another rank's is copied, for its owner may not know that.

        Raises:
            LostTensor: it is gone.
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

    # ---- letting go --------------------------------------------------------------------------------
    @property
    def holds(self) -> bool:
        """Whether there is anything to let go of."""
        return bool(self._made or self._looks)

    def keep_only(self, keys: Collection[str]) -> None:
        """Free and forget what is not among `keys`: nothing reads it any more."""
        for key in [key for key in self._looks if key not in keys]:
            handle, _ = self._looks.pop(key)
            if handle.rank != self._rank:
                self._store.release(handle)
        for key in [key for key in self._made if key not in keys and key not in self._new]:
            self._store.release(self._made.pop(key))

    def close(self) -> None:
        """Free all that is the step's."""
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
    """Whether a view still shows the tensor; called from engines' threads too.

    Raises:
        LostTensor: it does not.
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
    """The bytes, as `bytes`."""
    return data.tobytes() if data.nbytes <= IN_THREAD_BYTES else await asyncio.to_thread(data.tobytes)


async def as_inline(key: str, array: Array) -> Handle:
    """A handle with the tensor's bytes in it, however many there are."""
    return Handle(key=key, dtype=array.dtype, shape=array.shape, data=await copied(array.data))


def as_array(handle: Handle) -> Array:
    """The tensor that rides in a handle."""
    assert handle.data is not None
    return Array(dtype=handle.dtype, shape=handle.shape, data=np.frombuffer(handle.data, dtype=np.uint8))
