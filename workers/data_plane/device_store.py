"""Tensors on this rank's GPU: published from its device arena, and read from other ranks' by CUDA IPC.

Called in the engines' threads, with pointers and streams as plain numbers; no torch. A tensor is published
only when every rank that may read it is reached by CUDA IPC. Otherwise, and when the arena is full, the
caller publishes it in main memory. The copy into a slot has ended before the slot's handle exists, and a copy
out of a slot has ended before the slot is checked.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeAlias

from shared.errors import CapacityError, TensorGone
from shared.tensors import Handle, nbytes_of
from workers.data_plane.memory.cuda_driver import ANY_TO_ANY
from workers.data_plane.memory.device_arena import DeviceBytes
from workers.data_plane.port import INLINE_BYTES, Spans
from workers.data_plane.transport import Locator, Peer, TransportError
from workers.data_plane.transports.cuda_ipc import CudaIpcTransport

_LOGGER: Final = logging.getLogger(__name__)

Register: TypeAlias = Callable[[tuple[int, int], str, str, tuple[int, ...], Locator, str], Handle]
"""Puts an own slot into a scope and makes its handle: key, dtype, shape, locator, scope."""


class DeviceStore:
    """The GPU side of an `ArenaStore`.

    `peer_of` returns another rank's current incarnation as `transport` reaches it, or None. `own` returns
    this rank and its incarnation. `register` adds a slot to the store, for the incarnation that allocated it.
    """

    def __init__(
        self,
        transport: CudaIpcTransport,
        peer_of: Callable[[int], Peer | None],
        own: Callable[[], tuple[int, int]],
        register: Register,
    ) -> None:
        self._transport = transport
        self._arena = transport.own
        self._driver = transport.own.driver
        self._peer_of = peer_of
        self._own = own
        self._register = register
        self._fallbacks: set[str] = set()

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
        """Copy `source` into a slot on `stream`, wait for the copy, and return the tensor's handle.

        None where the tensor is to be published in main memory: it is small, a reader is not reached by CUDA
        IPC, or the arena is full.
        """
        nbytes = nbytes_of(dtype, shape)
        if nbytes <= INLINE_BYTES:
            return None
        for rank in readers:
            peer = self._peer_of(rank)
            if peer is None or not self._transport.opens(peer):
                self._log_fallback(f"rank {rank} is not reached by cuda_ipc")
                return None
        own = self._own()
        try:
            locator, slot = self._arena.allocate(nbytes)
        except CapacityError as error:
            self._log_fallback(error.message)
            return None
        try:
            self._driver.setDevice(self._arena.device)
            copied = self._copy(_pairs(slot.pointer, source), stream)
            self._arena.written(locator, stream)
            self._driver.streamSynchronize(stream)
        except self._driver.CUDARuntimeError as error:
            self._arena.free(locator.generation)
            self._log_fallback(f"copying failed: {error}")
            return None
        assert copied == nbytes, f"expected {nbytes} bytes for {dtype}{list(shape)}, copied {copied}"
        return self._register(own, key, dtype, shape, locator, scope)

    def reads(self, rank: int) -> bool:
        """Return True if tensors on the GPU of `rank` are read by CUDA IPC."""
        return self._peer_of(rank) is not None

    def copy_out(self, rank: int, locator: Locator, into: Spans, stream: int) -> None:
        """Copy another rank's tensor to `into` on `stream`, and wait for the copy.

        Raises:
            TensorGone: the slot was freed, or cannot be read.
        """
        peer = self._peer_of(rank)
        if peer is None:
            raise TensorGone(f"rank {rank} is not reached by cuda_ipc")
        try:
            self._driver.setDevice(self._arena.device)
            self._copy_from(self._transport.borrow(peer, locator, stream=stream), into, stream)
        except (TransportError, self._driver.CUDARuntimeError) as error:
            raise TensorGone(str(error)) from error
        self._transport.check(peer, locator)

    def copy_own(self, locator: Locator, into: Spans, stream: int) -> None:
        """Copy an own tensor to `into` on `stream`, and wait for the copy.

        Raises:
            TensorGone: the slot was freed.
        """
        try:
            self._driver.setDevice(self._arena.device)
            self._copy_from(self._arena.look(locator, stream), into, stream)
        except self._driver.CUDARuntimeError as error:
            raise TensorGone(str(error)) from error
        self._arena.check(locator)

    def _copy_from(self, view: DeviceBytes, into: Spans, stream: int) -> None:
        self._copy(((to, of, size) for (of, to, size) in _pairs(view.pointer, into)), stream)
        self._driver.streamSynchronize(stream)

    def _copy(self, copies: Iterable[tuple[int, int, int]], stream: int) -> int:
        copied = 0
        for to, of, size in copies:
            self._driver.memcpyAsync(to, of, size, ANY_TO_ANY, stream)
            copied += size
        return copied

    def _log_fallback(self, reason: str) -> None:
        """Log a reason for main memory; each one once."""
        if reason not in self._fallbacks and len(self._fallbacks) < 64:
            self._fallbacks.add(reason)
            _LOGGER.info("data plane: a tensor of the GPU is published in main memory: %s", reason)


def _pairs(pointer: int, spans: Spans) -> Iterable[tuple[int, int, int]]:
    """Consecutive positions from `pointer` on, each with a span: (position, span's pointer, size)."""
    for other, size in spans:
        yield pointer, other, size
        pointer += size
