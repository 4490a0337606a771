"""What the rest of a worker asks of the data plane.

Five verbs: `allocate` (and compute straight into the slot), `put`, `get`, `release`, `end`. A tensor belongs
to a scope: a path such as `<request>/<attempt>/<step>`. Whoever ends a scope ends all below it, and so frees
by what the log says and not by counting who has read. A scope ends for good: what a straggler still puts
into it is gone at once, so that nothing is left over. Small tensors ride inline in their handle and have no
slot.

Called from the event loop's thread and from engines' threads alike; only `get` may wait.
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
"""A tensor's bytes, contiguous, little-endian, one-dimensional; what is read is not to be written."""

INLINE_BYTES: Final = 1024
"""Up to so many bytes ride in the event itself: an event costs more than its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A tensor's bytes with what they mean; `dtype` as torch spells it: `float32`, `bfloat16`, `int64`."""

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
    """How full an arena is, in bytes and slots, and what happened to it since its life began."""

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
    """One worker's tensors, and the way to other workers'."""

    @property
    def endpoints(self) -> dict[str, bytes]:
        """By transport, how other workers reach this store; for the own `worker.joined`."""
        ...

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        """This life's name, once it is known: what is put from now on is of it, what was before is gone."""
        ...

    def add_peer(self, rank: int, incarnation: int, endpoints: Mapping[str, bytes]) -> None:
        """Another rank's life has begun; handles of its earlier lives are gone from here on."""
        ...

    def remove_peer(self, rank: int, incarnation: int) -> None:
        """A rank's life is over."""
        ...

    def allocate(self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str) -> tuple[Handle, Bytes]:
        """A slot to compute into: write its bytes, then hand on the handle. Never inline.

        As long as there is a view of it here, its memory is no other tensor's, whatever has ended.

        Raises:
            CapacityError: the arena is full, and stays so.
            ValueError: a dtype that is unknown.
        """
        ...

    def put(self, key: str, dtype: str, shape: tuple[int, ...], data: Bytes, *, scope: str) -> Handle:
        """Copy a tensor in; up to `INLINE_BYTES` it rides in the handle.

        Raises:
            CapacityError: the arena is full, and stays so.
            ValueError: a dtype that is unknown, or bytes that do not fit dtype and shape.
        """
        ...

    async def get(self, handle: Handle) -> Bytes:
        """The bytes behind a handle: a view where they are on this machine, else a copy in this arena.

        Good until `check` says otherwise, or the view's own scope ends.

        Raises:
            TensorGone: they are not there any more, or never were.
        """
        ...

    def check(self, handle: Handle) -> None:
        """Whether a view of `get` still shows the tensor: asked once it was read, before its use is told.

        Raises:
            TensorGone: its slot was freed meanwhile; what was read may be another tensor's bytes.
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
        """Free an own slot early, or let go of a view; any number of times."""
        ...

    def keep(self, handle: Handle, *, scope: str) -> None:
        """Move an own slot into another scope: it outlives the step that made it."""
        ...

    def end(self, scope: str) -> int:
        """End a scope and all below it for good, and free their own slots; how many there were."""
        ...

    def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Give everything back; nothing of it is left on the machine."""
        ...
