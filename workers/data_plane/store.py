"""The data plane's port over an arena and the ways to other arenas.

    put, allocate ──> Arena <── look ── get, of an own handle
                                         get, of another's ──> routes to that life, in order ──> Transport

A handle names its owner's life: of one that this store has not met, or that is over, everything is gone
without asking. A way that fails gives way to the next for as long as that life lasts; that a tensor is gone
is final, whoever says so.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from shared.errors import BugError, TensorGone
from shared.tensors import Handle, nbytes_of
from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import INLINE_BYTES, Bytes, StoreStats
from workers.data_plane.refusals import Refusals
from workers.data_plane.scopes import Scopes
from workers.data_plane.transport import Locator, Peer, Transport, TransportError
from workers.data_plane.transports.local import LocalTransport
from workers.data_plane.transports.shm import ShmTransport
from workers.data_plane.transports.shm_named import NamedShmTransport

_LOGGER: Final = logging.getLogger(__name__)

MakeTransport: TypeAlias = Callable[[Arena], Transport]
SHARED_MEMORY: Final[Sequence[MakeTransport]] = (LocalTransport, ShmTransport, NamedShmTransport)
"""The ways that cost no copy, the cheapest first."""


def open_store(
    *,
    total_bytes: int,
    transports: Sequence[MakeTransport] = SHARED_MEMORY,
    memory: Literal["anonymous", "named"] = "anonymous",
    folder: Path = backing.FOLDER,
) -> "ArenaStore":
    """A store with an arena of its own, which takes memory as it is used.

    Args:
        total_bytes: the most the arena will take.
        transports: ways to other stores, made over the arena, the cheapest first.
        memory: `named` where workers on this machine do not see each other's processes, but share `folder`.
        folder: where a named arena is; what owners that were killed have left there is removed first.

    Raises:
        OSError: the system gives no such memory.
    """
    if memory == "named":
        if removed := backing.sweep(folder):
            _LOGGER.info("removed the memory of %d workers that are gone from %s", removed, folder)
        arena = Arena(total_bytes, lambda layout: backing.named(layout, folder))
    else:
        arena = Arena(total_bytes, backing.anonymous)
    try:
        return ArenaStore(arena, [make(arena) for make in transports])
    except BaseException:
        arena.close()
        raise


class ArenaStore:
    """A worker's `TensorStore`; `transports` are the ways to others, the cheapest first."""

    def __init__(self, arena: Arena, transports: Sequence[Transport]) -> None:
        self._arena = arena
        self._transports = transports
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._scopes: Scopes[int] = Scopes()
        self._own: tuple[int, int] | None = None
        self._peers: dict[int, _PeerIncarnation] = {}
        self._puts = self._gets = self._gone = self._fetched_bytes = 0

    @property
    def endpoints(self) -> dict[str, bytes]:
        endpoints = {transport.name: transport.endpoint() for transport in self._transports}
        return {name: endpoint for name, endpoint in endpoints.items() if endpoint}

    # ---- lives -----------------------------------------------------------------------------------------

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        with self._lock:
            if self._own == (rank, incarnation):
                return
            self._own = (rank, incarnation)
            for generation in self._scopes.clear():
                self._arena.free(generation)

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
        life = self._own
        if life is None:
            raise BugError("the store has no incarnation yet: call `begin_incarnation` before the first put")
        locator = self._arena.allocate(nbytes_of(dtype, shape))
        view = self._arena.look(locator, writable=True)
        with self._lock:
            self._puts += 1
            # Where all is over already nobody would ever free it: it is gone at once.
            if life != self._own or not self._scopes.add(locator.generation, scope):
                self._arena.free(locator.generation)
        rank, incarnation = life
        packed = msgspec.msgpack.encode(locator)
        handle = Handle(key=key, dtype=dtype, shape=shape, rank=rank, incarnation=incarnation, locator=packed)
        return handle, view

    def put(self, key: str, dtype: str, shape: tuple[int, ...], data: Bytes, *, scope: str) -> Handle:
        nbytes = nbytes_of(dtype, shape)
        if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes != nbytes:
            raise ValueError(
                f"tensor {key}: {dtype}{list(shape)} is one dimension of {nbytes} uint8, "
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
                self._arena.free(locator.generation)

    def keep(self, handle: Handle, *, scope: str) -> None:
        """As the port says; another worker's tensor is that worker's to keep.

        Raises:
            TensorGone: it is not there any more.
        """
        if not self._is_own(handle):
            return
        with self._lock:
            locator = self._checked(handle)
            self._arena.check(locator)
            if not self._scopes.add(locator.generation, scope):
                self._scopes.discard(locator.generation)
                self._arena.free(locator.generation)

    def end(self, scope: str) -> int:
        with self._lock:
            ended = self._scopes.end(scope)
            for generation in ended:
                self._arena.free(generation)
        return len(ended)

    # ---- reading ---------------------------------------------------------------------------------------

    async def get(self, handle: Handle) -> Bytes:
        self._gets += 1
        try:
            if handle.data is not None:
                return self._inline(handle, handle.data)
            locator = self._checked(handle)
            if self._is_own(handle):
                return self._arena.look(locator)
            return await self._fetch(self._peer_of(handle), locator)
        except TensorGone as error:
            raise self._counted(handle, error) from error

    def check(self, handle: Handle) -> None:
        if handle.data is not None:
            return
        try:
            locator = self._checked(handle)
            if self._is_own(handle):
                self._arena.check(locator)
                return
            # Each way answers for what it may have given a view of; nobody remembers which one it was.
            for route in self._peer_of(handle).routes:
                route.transport.check(route.peer, locator)
        except TensorGone as error:
            raise self._counted(handle, error) from error

    async def _fetch(self, life: "_PeerIncarnation", locator: Locator) -> Bytes:
        failed: list[str] = []
        for route in life.routes:
            try:
                found = await route.transport.fetch(route.peer, locator)
            except TransportError as error:
                failed.append(f"{route.transport.name}: {error}")
                _LOGGER.warning("data plane: rank %d is not reached by %s", route.peer.rank, failed[-1])
                life.ask_last(route)
                continue
            self._fetched_bytes += found.nbytes
            return found
        raise TensorGone(f"no way to its owner; {'; '.join(failed) or 'no transport reaches it'}")

    # ---- handles ---------------------------------------------------------------------------------------

    def _is_own(self, handle: Handle) -> bool:
        return handle.data is None and self._own == (handle.rank, handle.incarnation)

    def _peer_of(self, handle: Handle) -> "_PeerIncarnation":
        life = self._peers.get(handle.rank) if handle.rank is not None else None
        if life is None or life.incarnation != handle.incarnation:
            now = f"now it is {life.incarnation}" if life is not None else "none of it is known here"
            raise TensorGone(f"it was of rank {handle.rank}'s life {handle.incarnation}; {now}")
        return life

    def _inline(self, handle: Handle, data: bytes) -> Bytes:
        if len(data) != self._nbytes(handle):
            raise self._refused(handle, f"{len(data)} bytes ride inline")
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
        """Counted, and with its name."""
        self._gone += 1
        return TensorGone(f"tensor {handle.key}: {error.message}")

    # ---- all of it -------------------------------------------------------------------------------------

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


@dataclass(slots=True)
class _PeerIncarnation:
    """Another rank's life, and the ways to it, the one to try first in front.

    `routes` is replaced and not changed: threads read it.
    """

    incarnation: int
    routes: list[_Route]

    def ask_last(self, route: _Route) -> None:
        self.routes = [*(other for other in self.routes if other is not route), route]


def _locator(handle: Handle) -> Locator | None:
    try:
        return msgspec.msgpack.decode(handle.locator or b"", type=Locator)
    except (msgspec.DecodeError, RecursionError):
        return None
