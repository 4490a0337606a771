"""The port of the data plane: the interface of a worker's tensor store.

A tensor belongs to a scope, a path such as `<request>/<attempt>/<step>`. The end of a scope ends everything
below it. So tensors are freed by what the log says, not by a count of readers. A scope ends for good: a
tensor that is put into it later is freed at once, so nothing is left over. Small tensors are inline in their
handle and have no slot.

The methods are called from the event loop's thread and from engines' threads. Only `get` may wait.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.tensors import Handle

Spans: TypeAlias = Iterable[tuple[int, int]]
"""Consecutive pieces of memory, host or device: pointer and length of each."""

Bytes = npt.NDArray[np.uint8]
"""A tensor's bytes: contiguous, little-endian, one-dimensional. A reader must not write them."""

INLINE_BYTES: Final = 1024
"""The largest tensor that is inline in its event: an event costs more than these bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A tensor's bytes, dtype and shape; `dtype` is torch's name: `float32`, `bfloat16`, `int64`."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """A tensor in GPU memory of this machine; engines copy it in their threads.

    Attributes:
        copy_to: copies the bytes to consecutive pieces of memory on a CUDA stream and waits for the copy;
            raises `TensorGone` if the tensor is gone by then.
    """

    dtype: str
    shape: tuple[int, ...]
    copy_to: Callable[[Spans, int], None]


PublishOnDevice: TypeAlias = Callable[[str, tuple[int, ...], Spans, int], Handle | None]
"""Publishes a tensor of the GPU: dtype, shape, its memory, the CUDA stream that has written it. Returns None
where main memory has to be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The fill level of an arena in bytes and slots, and the counters of its store since the start."""

    total_bytes: int = 0
    free_bytes: int = 0
    largest_free_bytes: int = 0
    slots: int = 0
    scopes: int = 0
    puts: int = 0
    gets: int = 0
    gone: int = 0
    refused: int = 0
    fetched_bytes: int = 0


class DevicePort(Protocol):
    """Publication of tensors in GPU memory (`workers.data_plane.device_store.DeviceStore`)."""

    def put(
        self,
        key: str,
        dtype: str,
        shape: tuple[int, ...],
        source: Spans,
        stream: int,
        *,
        scope: str,
        readers: Collection[int],
    ) -> Handle | None:
        """Publish a tensor of the GPU for the ranks `readers`; None where main memory has to be used."""
        ...


class TensorStore(Protocol):
    """A worker's tensors, and access to other workers' tensors."""

    @property
    def endpoints(self) -> dict[str, bytes]:
        """By transport, the endpoint of this store; part of the own `worker.joined`."""
        ...

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        """Begin an incarnation: later tensors belong to it; tensors of an earlier one are freed."""
        ...

    def add_peer(self, rank: int, incarnation: int, endpoints: Mapping[str, bytes]) -> None:
        """Note that a new incarnation of another rank has started; handles of its earlier ones are gone."""
        ...

    def remove_peer(self, rank: int, incarnation: int) -> None:
        """Note that a rank's incarnation has ended."""
        ...

    def allocate(self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str) -> tuple[Handle, Bytes]:
        """Return a slot to compute into: write its bytes, then publish the handle. Never inline.

        The memory is not reused while a view of it exists in this process, even after the scope has ended.

        Raises:
            CapacityError: the arena is full.
            ValueError: the dtype is unknown.
        """
        ...

    def put(self, key: str, dtype: str, shape: tuple[int, ...], data: Bytes, *, scope: str) -> Handle:
        """Copy a tensor in; up to `INLINE_BYTES` it is inline in the handle.

        Raises:
            CapacityError: the arena is full.
            ValueError: the dtype is unknown, or the bytes do not fit dtype and shape.
        """
        ...

    async def get(self, handle: Handle) -> Bytes:
        """Return a handle's bytes: a view if they are on this machine, else a copy in this arena.

        The bytes are valid if a later `check` passes.

        Raises:
            TensorGone: the tensor is gone, or never existed.
        """
        ...

    def check(self, handle: Handle) -> None:
        """Check, after reading a view of `get` and before using the result, that the tensor was still there.

        Raises:
            TensorGone: the slot was freed meanwhile; the bytes read may be another tensor's.
        """
        ...

    def on_device(self, handle: Handle) -> DeviceArray | None:
        """Return a tensor of the GPU for engines to copy in their threads; None if it is read by `get`."""
        ...

    @property
    def device(self) -> "DevicePort | None":
        """The tensors on this rank's GPU; None where none are published there."""
        ...

    def release(self, handle: Handle) -> None:
        """Free an own slot early, or drop a view; may be repeated."""
        ...

    def keep(self, handle: Handle, *, scope: str) -> None:
        """Move an own slot into another scope, so that it outlives its step."""
        ...

    def end(self, scope: str) -> int:
        """End a scope and all below it for good; free its own slots, and return their number."""
        ...

    def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Release all memory; nothing is left on the machine."""
        ...
