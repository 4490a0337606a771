"""The tensor store of a worker: an arena, and an ordered list of transports to other workers' arenas.

    put, allocate ──> Arena <── look ── get, of an own handle
                                        get, of another rank's handle ──> routes, in order ──> Transport

A handle names its owner's incarnation. If this store does not know that incarnation, or it has ended, the
tensor is gone without a request. A transport that fails gives way to the next one for as long as that
incarnation lasts. The answer that a tensor is gone is final, whichever transport gave it.

A tensor lies in the arena, or in its twin on the GPU (`device`). The latter is read by CUDA IPC only.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from shared.errors import BugError, TensorGone
from shared.tensors import Handle, nbytes_of
from workers.data_plane.device_store import DeviceStore
from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import INLINE_BYTES, Bytes, DeviceArray, Spans, StoreStats
from workers.data_plane.refusals import Refusals
from workers.data_plane.scopes import Scopes
from workers.data_plane.transport import DEVICE_SEGMENT, Locator, Peer, Transport, TransportError
from workers.data_plane.transports.cuda_ipc import CudaIpcTransport
from workers.data_plane.transports.local import LocalTransport
from workers.data_plane.transports.shm import ShmTransport
from workers.data_plane.transports.shm_named import NamedShmTransport

_LOGGER: Final = logging.getLogger(__name__)

MakeTransport: TypeAlias = Callable[[Arena], Transport | None]
"""Makes a transport over an arena; None where the machine does not support it."""
SHARED_MEMORY: Final[Sequence[MakeTransport]] = (LocalTransport, ShmTransport, NamedShmTransport)
"""The transports without a copy, the cheapest first."""


def open_store(
    *,
    total_bytes: int,
    transports: Sequence[MakeTransport] = SHARED_MEMORY,
    memory: Literal["anonymous", "named"] = "anonymous",
    folder: Path = backing.FOLDER,
) -> "ArenaStore":
    """Return a store with a new arena, which takes memory as it is used.

    Args:
        total_bytes: the capacity of the arena.
        transports: make the transports to other stores, the cheapest first.
        memory: `named` if the workers of this machine do not see each other's processes, but share `folder`.
        folder: the folder of a named arena; arenas of killed owners are removed from it first.

    Raises:
        OSError: the system does not provide such memory.
    """
    if memory == "named":
        if removed := backing.sweep(folder):
            _LOGGER.info("removed the memory of %d dead workers from %s", removed, folder)
        arena = Arena(total_bytes, lambda layout: backing.named(layout, folder))
    else:
        arena = Arena(total_bytes, backing.anonymous)
    try:
        made = [make(arena) for make in transports]
        return ArenaStore(arena, [transport for transport in made if transport is not None])
    except BaseException:
        arena.close()
        raise


class ArenaStore:
    """A worker's `TensorStore`; `transports` lead to other workers, the cheapest first.

    Attributes:
        device: the tensors on this rank's GPU; None without CUDA IPC.
    """

    def __init__(self, arena: Arena, transports: Sequence[Transport]) -> None:
        self._arena = arena
        self._transports = transports
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._scopes: Scopes[int] = Scopes()
        self._own: tuple[int, int] | None = None
        self._peers: dict[int, _PeerIncarnation] = {}
        self._cuda_ipc = next((one for one in transports if isinstance(one, CudaIpcTransport)), None)
        self.device: DeviceStore | None = None
        if self._cuda_ipc is not None:
            self.device = DeviceStore(self._cuda_ipc, self._cuda_peer, self._must_have_begun, self._register)
        self._puts = self._gets = self._gone = self._fetched_bytes = 0

    @property
    def endpoints(self) -> dict[str, bytes]:
        endpoints = {transport.name: transport.endpoint() for transport in self._transports}
        return {name: endpoint for name, endpoint in endpoints.items() if endpoint}

    # ---- incarnations -----------------------------------------------------------------------------------

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        with self._lock:
            if self._own == (rank, incarnation):
                return
            self._own = (rank, incarnation)
            for generation in self._scopes.clear():
                self._free(generation)

    def add_peer(self, rank: int, incarnation: int, endpoints: Mapping[str, bytes]) -> None:
        known = self._peers.get(rank)
        if self._own == (rank, incarnation) or (known is not None and known.incarnation >= incarnation):
            return
        if known is not None:
            self.remove_peer(rank, known.incarnation)
        routes = [
            _Route(transport, Peer(rank, incarnation, endpoints[transport.name]))
            for transport in self._transports
            if transport.name in endpoints
        ]
        self._peers[rank] = _PeerIncarnation(
            incarnation, [route for route in routes if route.transport.reaches(route.peer)]
        )

    def remove_peer(self, rank: int, incarnation: int) -> None:
        known = self._peers.get(rank)
        if known is None or known.incarnation != incarnation:
            return
        del self._peers[rank]
        for route in known.routes:
            route.transport.forget(route.peer)

    # ---- own tensors -----------------------------------------------------------------------------------

    def allocate(self, key: str, dtype: str, shape: tuple[int, ...], *, scope: str) -> tuple[Handle, Bytes]:
        own = self._must_have_begun()
        locator = self._arena.allocate(nbytes_of(dtype, shape))
        view = self._arena.look(locator, writable=True)
        return self._register(own, key, dtype, shape, locator, scope), view

    def put(self, key: str, dtype: str, shape: tuple[int, ...], data: Bytes, *, scope: str) -> Handle:
        nbytes = nbytes_of(dtype, shape)
        if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes != nbytes:
            raise ValueError(
                f"tensor {key}: expected {nbytes} uint8 in one dimension for {dtype}{list(shape)}, "
                f"found {data.dtype}{list(data.shape)}"
            )
        if nbytes <= INLINE_BYTES:
            with self._lock:
                self._puts += 1
            return Handle(key=key, dtype=dtype, shape=shape, data=data.tobytes())
        handle, slot = self.allocate(key, dtype, shape, scope=scope)
        np.copyto(slot, data)
        return handle

    def release(self, handle: Handle) -> None:
        if self._is_own(handle) and (locator := _locator(handle)) is not None:
            with self._lock:
                self._scopes.discard(locator.generation)
                self._free(locator.generation)

    def keep(self, handle: Handle, *, scope: str) -> None:
        """Move an own tensor to another scope; another worker's tensor is left alone.

        Raises:
            TensorGone: the tensor is gone.
        """
        if not self._is_own(handle):
            return
        with self._lock:
            locator = self._checked(handle)
            self._check_own(locator)
            if not self._scopes.add(locator.generation, scope):
                self._scopes.discard(locator.generation)
                self._free(locator.generation)

    def end(self, scope: str) -> int:
        with self._lock:
            ended = self._scopes.end(scope)
            for generation in ended:
                self._free(generation)
        return len(ended)

    # ---- reading ---------------------------------------------------------------------------------------

    async def get(self, handle: Handle) -> Bytes:
        self._gets += 1
        try:
            if handle.data is not None:
                return self._inline(handle, handle.data)
            locator = self._checked(handle)
            if self._is_own(handle):
                return await self._look(locator)
            return await self._fetch(self._peer_of(handle), locator)
        except TensorGone as error:
            raise self._counted(handle, error) from error

    def check(self, handle: Handle) -> None:
        if handle.data is not None:
            return
        try:
            locator = self._checked(handle)
            if self._is_own(handle):
                self._check_own(locator)
                return
            # Each transport checks the views it may have given; the store does not record which one it was.
            for route in self._peer_of(handle).routes_to(locator):
                route.transport.check(route.peer, locator)
        except TensorGone as error:
            raise self._counted(handle, error) from error

    async def _look(self, locator: Locator) -> Bytes:
        if locator.segment != DEVICE_SEGMENT or self._cuda_ipc is None:
            return self._arena.look(locator)
        try:
            return await self._cuda_ipc.fetch_own(locator)
        except TransportError as error:
            raise TensorGone(str(error)) from error

    async def _fetch(self, peer: "_PeerIncarnation", locator: Locator) -> Bytes:
        failed: list[str] = []
        for route in peer.routes_to(locator):
            try:
                found = await route.fetch(locator)
            except TransportError as error:
                failed.append(f"{route.transport.name}: {error}")
                _LOGGER.warning("data plane: rank %d is not reached by %s", route.peer.rank, failed[-1])
                peer.try_last(route)
                continue
            self._fetched_bytes += found.nbytes
            return found
        raise TensorGone(f"its owner is not reached; {'; '.join(failed) or 'there is no transport to it'}")

    # ---- on the GPU ------------------------------------------------------------------------------------

    def on_device(self, handle: Handle) -> DeviceArray | None:
        """Return a tensor of the GPU for engines to copy; None if it is read as bytes."""
        locator = _locator(handle) if handle.data is None else None
        if self.device is None or locator is None or locator.segment != DEVICE_SEGMENT:
            return None
        device, rank = self.device, handle.rank
        if not self._is_own(handle) and (rank is None or self._cuda_peer(rank) is None):
            return None

        def copy_to(into: Spans, stream: int) -> None:
            try:
                locator = self._checked(handle)
                if self._is_own(handle):
                    device.copy_own(locator, into, stream)
                    return
                self._peer_of(handle)
                assert rank is not None
                device.copy_out(rank, locator, into, stream)
            except TensorGone as error:
                raise self._counted(handle, error) from error

        self._gets += 1
        return DeviceArray(dtype=handle.dtype, shape=handle.shape, copy_to=copy_to)

    def _cuda_peer(self, rank: int) -> Peer | None:
        peer = self._peers.get(rank)
        routes = peer.routes if peer is not None else []
        return next((route.peer for route in routes if route.transport is self._cuda_ipc), None)

    # ---- slots -----------------------------------------------------------------------------------------

    def _register(
        self,
        own: tuple[int, int],
        key: str,
        dtype: str,
        shape: tuple[int, ...],
        locator: Locator,
        scope: str,
    ) -> Handle:
        """Add a slot that incarnation `own` allocated; free it if that or the scope has ended meanwhile."""
        with self._lock:
            self._puts += 1
            # In an ended scope nothing would ever free the slot.
            if own != self._own or not self._scopes.add(locator.generation, scope):
                self._free(locator.generation)
        rank, incarnation = own
        packed = msgspec.msgpack.encode(locator)
        return Handle(key=key, dtype=dtype, shape=shape, rank=rank, incarnation=incarnation, locator=packed)

    def _must_have_begun(self) -> tuple[int, int]:
        if self._own is None:
            raise BugError("the store has no incarnation yet: call `begin_incarnation` before the first put")
        return self._own

    def _free(self, generation: int) -> None:
        if not self._arena.free(generation) and self._cuda_ipc is not None:
            self._cuda_ipc.own.free(generation)

    def _check_own(self, locator: Locator) -> None:
        if locator.segment == DEVICE_SEGMENT and self._cuda_ipc is not None:
            self._cuda_ipc.own.check(locator)
        else:
            self._arena.check(locator)

    # ---- handles ---------------------------------------------------------------------------------------

    def _is_own(self, handle: Handle) -> bool:
        return handle.data is None and self._own == (handle.rank, handle.incarnation)

    def _peer_of(self, handle: Handle) -> "_PeerIncarnation":
        peer = self._peers.get(handle.rank) if handle.rank is not None else None
        if peer is None or peer.incarnation != handle.incarnation:
            now = f"the current one is {peer.incarnation}" if peer is not None else "none is known here"
            raise TensorGone(f"it was of rank {handle.rank}'s incarnation {handle.incarnation}; {now}")
        return peer

    def _inline(self, handle: Handle, data: bytes) -> Bytes:
        if len(data) != self._nbytes(handle):
            raise self._refused(handle, f"{len(data)} bytes are inline")
        return np.frombuffer(data, np.uint8)

    def _checked(self, handle: Handle) -> Locator:
        locator = _locator(handle)
        if locator is None:
            raise self._refused(handle, "its locator cannot be read")
        if locator.nbytes != self._nbytes(handle):
            raise self._refused(handle, f"its slot has {locator.nbytes} bytes")
        return locator

    def _nbytes(self, handle: Handle) -> int:
        try:
            return nbytes_of(handle.dtype, handle.shape)
        except ValueError as error:
            raise self._refused(handle, str(error)) from error

    def _refused(self, handle: Handle, why: str) -> TensorGone:
        self._refusals.add(f"tensor {handle.key[:200]}, {handle.dtype[:40]}{list(handle.shape[:8])}: {why}")
        return TensorGone(f"no tensor has this handle: {why}")

    def _counted(self, handle: Handle, error: TensorGone) -> TensorGone:
        """Count the loss, and name the tensor."""
        self._gone += 1
        return TensorGone(f"tensor {handle.key}: {error.message}")

    # ---- the whole store --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        arena = self._arena.stats()
        with self._lock:
            scopes = self._scopes.count
        return StoreStats(
            total_bytes=arena.total_bytes,
            free_bytes=arena.free_bytes,
            largest_free_bytes=arena.largest_free_bytes,
            slots=arena.slots,
            scopes=scopes,
            puts=self._puts,
            gets=self._gets,
            gone=self._gone,
            refused=self._refusals.count + sum(transport.refused for transport in self._transports),
            fetched_bytes=self._fetched_bytes,
        )

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()
        self._arena.close()


@dataclass(frozen=True, slots=True)
class _Route:
    transport: Transport
    peer: Peer

    async def fetch(self, locator: Locator) -> Bytes:
        try:
            return await self.transport.fetch(self.peer, locator)
        except (TransportError, TensorGone) as error:
            _clear_frames(error)
            raise


@dataclass(slots=True)
class _PeerIncarnation:
    """Another rank's incarnation, and the routes to it, in the order in which they are tried.

    `routes` is replaced and never changed in place, because other threads read it.
    """

    incarnation: int
    routes: list[_Route]

    def routes_to(self, locator: Locator) -> list[_Route]:
        """Return the routes to a slot: on a GPU CUDA IPC alone, in main memory the others."""
        on_device = locator.segment == DEVICE_SEGMENT
        routes = [route for route in self.routes if (route.transport.name == "cuda_ipc") == on_device]
        return routes if routes or on_device else self.routes

    def try_last(self, route: _Route) -> None:
        self.routes = [*(other for other in self.routes if other is not route), route]


def _locator(handle: Handle) -> Locator | None:
    try:
        return msgspec.msgpack.decode(handle.locator or b"", type=Locator)
    except (msgspec.DecodeError, RecursionError):
        return None


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables of the functions that an error and its causes went through.

    They refer to the memory that was taken for the tensor. An error may be kept for longer, also by the
    thread that raised it, while the next fetch needs that memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
