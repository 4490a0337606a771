"""CUDA IPC: GPU memory of another process of this machine, mapped into this process.

A peer's memory is opened once, with this process's current device; the peer's device would create a context
on its GPU. Then a tensor is a view of it (`borrow`). The reader's stream waits for the event recorded after
the last write; no thread of the reader waits.

    borrow   a view on the GPU, for work on a stream; `check` after that work has ended, before its result is
    used fetch    a copy in main memory; a tensor that the peer has in main memory is read there

Where CUDA refuses (containers without a common IPC namespace, gVisor, GPUs without peer access), this
transport reports it, and the owner publishes tensors for such a peer in main memory.

A mapping is closed when the peer is forgotten and its last view is gone. CUDA leaves undefined what a view
shows after its owner's process has died: a dead peer has to be forgotten, and is checked before.

The tests use a fake driver; `benchmarks.handoff_gpu` ran on one GPU (docs/log.md, 2026-11-27).
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import TensorGone
from workers.data_plane.memory.cuda_driver import DEVICE_TO_HOST, LAZY_PEER_ACCESS, NON_BLOCKING, Driver
from workers.data_plane.memory.device_arena import DeviceArena, DeviceBytes
from workers.data_plane.memory.layout import PAGE
from workers.data_plane.memory.reader import ArenaReader
from workers.data_plane.port import Bytes
from workers.data_plane.transport import DEVICE_SEGMENT, Locator, Peer, TransportError
from workers.data_plane.transports.endpoints import decode_endpoint
from workers.data_plane.transports.fetch_buffers import FetchBuffers
from workers.data_plane.transports.shm import ShmTransport

_LOGGER: Final = logging.getLogger(__name__)


class CudaEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint of a GPU arena.

    Attributes:
        host: the endpoint of the arena in main memory (`ShmEndpoint`), which holds the generations.
        table: the slot of the generations in it.
        bus_id: of the GPU on its machine; device numbers differ by process.
        memory: CUDA's handle of the memory.
        events: CUDA's handles of the events; a locator's `event` is an index into them.
    """

    host: bytes
    table: Locator
    bus_id: str
    memory: bytes
    nbytes: int
    events: list[bytes]


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Opened:
    """A peer's memory, mapped for one of our devices."""

    base: int
    nbytes: int
    events: list[int]
    words: npt.NDArray[np.uint64]

    def check(self, at: Locator) -> None:
        start, rest = divmod(at.offset, PAGE)
        if rest or at.offset < 0 or 2 * start + 1 >= len(self.words) or at.offset + at.nbytes > self.nbytes:
            raise TensorGone(f"there is no slot of {at.nbytes} bytes at {at.offset} of the GPU")
        if (int(self.words[2 * start]), int(self.words[2 * start + 1])) != (at.generation, at.nbytes):
            raise TensorGone(f"slot {at.generation} at {at.offset} of the GPU was freed, or never was")
        if not 0 <= at.event < len(self.events):
            raise TensorGone(f"the GPU has no event {at.event}")


class CudaIpcTransport:
    """Offers a GPU arena, `own`, to other processes of this machine, and views theirs; closes `own`."""

    name: Final = "cuda_ipc"

    def __init__(self, own: DeviceArena, buffers: FetchBuffers) -> None:
        self.own: Final = own
        self._driver: Final[Driver] = own.driver
        self._device = own.device
        self._buffers = buffers
        self._shm = ShmTransport(own.arena)
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, int, int], _Opened] = {}
        self._stream: int | None = None
        self._refused: set[tuple[int, int]] = set()
        self._endpoint = msgspec.msgpack.encode(
            CudaEndpoint(
                host=self._shm.endpoint(),
                table=own.table,
                bus_id=self._driver.deviceGetPCIBusId(own.device),
                memory=own.handle,
                nbytes=own.total_bytes,
                events=own.event_handles,
            )
        )

    @property
    def refused(self) -> int:
        """Always 0: peers send no requests."""
        return 0

    def endpoint(self) -> bytes:
        return self._endpoint

    def reaches(self, peer: Peer) -> bool:
        endpoint = decode_endpoint(peer.endpoint, CudaEndpoint)
        if endpoint is None or not self._shm.reaches(_host(peer, endpoint)):
            return False
        try:
            theirs = self._driver.deviceGetByPCIBusId(endpoint.bus_id)
            return theirs == self._device or bool(self._driver.deviceCanAccessPeer(self._device, theirs))
        except self._driver.CUDARuntimeError:  # this process does not see that GPU
            return False

    def borrow(self, peer: Peer, at: Locator, *, stream: int) -> DeviceBytes:
        """Return a view of a tensor on the peer's GPU, for work on `stream` of the current device.

        Raises:
            TensorGone: the slot is gone, or its owner is.
            TransportError: CUDA refuses.
        """
        opened = self._open(peer)
        opened.check(at)
        try:
            self._driver.streamWaitEvent(stream, opened.events[at.event])
        except self._driver.CUDARuntimeError as error:
            raise TransportError(f"rank {peer.rank}: {error}") from error
        return DeviceBytes(opened.base + at.offset, at.nbytes, opened)

    def opens(self, peer: Peer) -> bool:
        """Return True if this process can map the peer's memory. The converse then holds, too."""
        if (peer.rank, peer.incarnation) in self._refused:
            return False
        try:
            self._driver.setDevice(self._device)
            self._open(peer)
        except (TensorGone, TransportError, self._driver.CUDARuntimeError) as error:
            _LOGGER.warning("data plane: rank %d is not reached by cuda_ipc: %s", peer.rank, error)
            self._refused.add((peer.rank, peer.incarnation))
            return False
        return True

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        if locator.segment != DEVICE_SEGMENT:
            return await self._shm.fetch(_host(peer, _known(peer)), locator)
        return await self._fetch_device(
            locator,
            lambda stream: self.borrow(peer, locator, stream=stream),
            lambda: self._open(peer).check(locator),
        )

    async def fetch_own(self, locator: Locator) -> Bytes:
        """Copy an own tensor of the GPU into main memory.

        Raises:
            TensorGone: the slot was freed.
            TransportError: CUDA failed, or there is no room in main memory.
        """
        return await self._fetch_device(
            locator, lambda stream: self.own.look(locator, stream), lambda: self.own.check(locator)
        )

    def check(self, peer: Peer, locator: Locator) -> None:
        if locator.segment != DEVICE_SEGMENT:
            self._shm.check(peer, locator)
            return
        for (rank, incarnation, _), opened in tuple(self._opened.items()):
            if (rank, incarnation) == (peer.rank, peer.incarnation):
                opened.check(locator)

    def forget(self, peer: Peer) -> None:
        self._shm.forget(peer)
        self._refused.discard((peer.rank, peer.incarnation))
        with self._lock:
            for key in [key for key in self._opened if key[:2] == (peer.rank, peer.incarnation)]:
                del self._opened[key]

    async def close(self) -> None:
        await self._shm.close()
        with self._lock:
            self._opened.clear()
            stream, self._stream = self._stream, None
        if stream is not None:
            self._driver.streamDestroy(stream)
        self.own.close()

    # ---- inside ----------------------------------------------------------------------------------------

    async def _fetch_device(
        self, at: Locator, view_on: Callable[[int], DeviceBytes], check: Callable[[], None]
    ) -> Bytes:
        found: list[Bytes] = []
        await asyncio.to_thread(self._stage, at, view_on, check, found)
        return found.pop()

    def _stage(
        self,
        at: Locator,
        view_on: Callable[[int], DeviceBytes],
        check: Callable[[], None],
        found: list[Bytes],
    ) -> None:
        """Copy a tensor off a GPU, in a thread that may wait for the copy."""
        into = self._buffers.take(at.nbytes)
        try:
            self._driver.setDevice(self._device)
            stream = self._own_stream()
            view = view_on(stream)
            self._driver.memcpyAsync(into.ctypes.data, view.pointer, at.nbytes, DEVICE_TO_HOST, stream)
            self._driver.streamSynchronize(stream)
        except self._driver.CUDARuntimeError as error:
            raise TransportError(f"a copy off the GPU failed: {error}") from error
        check()
        into.flags.writeable = False
        found.append(into)

    def _own_stream(self) -> int:
        with self._lock:
            if self._stream is None:
                self._stream = self._driver.streamCreateWithFlags(NON_BLOCKING)
            return self._stream

    def _open(self, peer: Peer) -> _Opened:
        with self._lock:
            key = (peer.rank, peer.incarnation, self._driver.getDevice())
            if key not in self._opened:
                self._opened[key] = self._open_anew(peer, key[2])
            return self._opened[key]

    def _open_anew(self, peer: Peer, device: int) -> _Opened:
        endpoint = _known(peer)
        try:
            words = ArenaReader(*self._shm.open(_host(peer, endpoint))).view(endpoint.table).view(np.uint64)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise TensorGone(f"rank {peer.rank} is gone, and its memory with it: {error}") from error
        except OSError as error:
            raise TransportError(f"rank {peer.rank}: {error}") from error
        try:
            base = self._driver.ipcOpenMemHandle(endpoint.memory, LAZY_PEER_ACCESS)
        except self._driver.CUDARuntimeError as error:
            raise TransportError(f"rank {peer.rank}: its GPU's memory cannot be opened: {error}") from error
        events: list[int] = []
        opened = _Opened(base, endpoint.nbytes, events, words)
        weakref.finalize(opened, _close, self._driver, device, base, events).atexit = False
        try:
            events.extend(self._driver.ipcOpenEventHandle(handle) for handle in endpoint.events)
        except self._driver.CUDARuntimeError as error:
            raise TransportError(f"rank {peer.rank}: its GPU's events cannot be opened: {error}") from error
        return opened


def _close(driver: Driver, device: int, base: int, events: list[int]) -> None:
    current = driver.getDevice()
    driver.setDevice(device)
    for event in events:
        driver.eventDestroy(event)
    driver.ipcCloseMemHandle(base)
    driver.setDevice(current)


def _known(peer: Peer) -> CudaEndpoint:
    endpoint = decode_endpoint(peer.endpoint, CudaEndpoint)
    if endpoint is None:
        raise TransportError(f"rank {peer.rank}: its endpoint cannot be decoded")
    return endpoint


def _host(peer: Peer, endpoint: CudaEndpoint) -> Peer:
    return Peer(peer.rank, peer.incarnation, endpoint.host)
