"""NIXL: one-sided reads, by the network card itself with RDMA. Used only if it is configured.

The whole arena is registered once, and thereby locked in memory. An endpoint holds the data that NIXL needs
to reach it; an agent has a new name in each incarnation. All calls of NIXL are made on one thread
(`nixl_reads`): its own progress thread, which is off, takes most of a core for nothing.

The cost of our thread: without a network card that reads by itself, peers' requests have to be polled for.
The thread polls each millisecond while it knows of peers, ten times less often before, and continuously
during a read.

For trusted networks only: NIXL has no token, and UCX over TCP checks no range at the owner. Every host that
reaches the interface can read this worker's arena, as is usual with RDMA. UCX_NET_DEVICES names that
interface; the default is the one of `data_plane.address`. A process with an agent must not be forked.

Tested over UCX's TCP and shared memory; not tested with InfiniBand, RoCE or EFA.
"""

import array
import asyncio
import fcntl
import importlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, Peer, TransportError
from workers.data_plane.transports.endpoints import decode_endpoint, own_network
from workers.data_plane.transports.fetch_buffers import ArenaFetchBuffers
from workers.data_plane.transports.nixl_reads import HERE, LEAVING, NixlEndpoint, Reading, Reads

_LOGGER: Final = logging.getLogger(__name__)

PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
"""Not `nixl`: that package imports torch to choose between these two."""
_IDLE_S: Final = 0.001
_ALONE_S: Final = 0.01
_READER_S: Final = 2.0
"""A live reader announces itself again within half of that."""
_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True, slots=True)
class _Fetch:
    endpoint: NixlEndpoint
    locator: Locator
    found: list[Bytes]
    answer: Future[None]


@dataclass(frozen=True, slots=True)
class _Forget:
    endpoint: NixlEndpoint


class _Stop:
    """Ends the thread."""


_Order: TypeAlias = _Fetch | _Forget | _Stop


class NixlTransport:
    """Registers an arena, and reads from other workers' arenas."""

    name: Final = "nixl"

    def __init__(self, arena: Arena, *, address: str) -> None:
        """Make an agent, and register the arena with it.

        Raises:
            ValueError: NIXL is not installed, or `address` is on no interface of this machine.
            OSError: the system does not have the memory that the arena may take, or NIXL cannot start.
        """
        package = _package()
        interface = os.environ.setdefault("UCX_NET_DEVICES", interface_of(address))
        self._network = own_network() if interface == "lo" else ""
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._peers: set[tuple[int, int]] = set()
        self._is_closed = False
        arena.hold()
        started: Future[NixlEndpoint] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(package, arena, started), name="nixl", daemon=True
        )
        self._thread.start()
        self._endpoint = msgspec.msgpack.encode(started.result())

    @property
    def refused(self) -> int:
        """Always 0: NIXL does not report requests to this process."""
        return 0

    def endpoint(self) -> bytes:
        return self._endpoint

    def reaches(self, peer: Peer) -> bool:
        endpoint = decode_endpoint(peer.endpoint, NixlEndpoint)
        if endpoint is None or (endpoint.network and endpoint.network != own_network()):
            return False
        self._peers.add((peer.rank, peer.incarnation))
        return True

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        endpoint = decode_endpoint(peer.endpoint, NixlEndpoint)
        if endpoint is None or self._is_closed:
            raise TransportError(
                f"rank {peer.rank}: no endpoint that can be decoded, or this worker is closing"
            )
        found: list[Bytes] = []
        answer: Future[None] = Future()
        self._orders.put(_Fetch(endpoint, locator, found, answer))
        await asyncio.wrap_future(answer)
        return found.pop()

    def check(self, peer: Peer, locator: Locator) -> None:
        """Nothing to check: a copy stays valid."""

    def forget(self, peer: Peer) -> None:
        self._peers.discard((peer.rank, peer.incarnation))
        if (endpoint := decode_endpoint(peer.endpoint, NixlEndpoint)) is not None:
            self._orders.put(_Forget(endpoint))

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._orders.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    # ---- the agent's thread ----------------------------------------------------------------------------

    def _run(self, package: ModuleType, arena: Arena, started: Future[NixlEndpoint]) -> None:
        errors = errors_of(package)
        try:
            agent, registered, endpoint = _open(package, arena, self._network)
        except errors as error:
            started.set_exception(OSError(f"NIXL cannot be used here: {type(error).__name__}: {error}"))
            return
        started.set_result(endpoint)
        reads = Reads(agent, ArenaFetchBuffers(arena), errors)
        _Loop(reads, self._orders, self._peers).run()
        agent.deregister_memory(registered)


class _Loop:
    """Run the thread's loop until it is stopped."""

    def __init__(self, reads: Reads, orders: queue.SimpleQueue[_Order], peers: set[tuple[int, int]]) -> None:
        self._reads = reads
        self._orders = orders
        self._peers = peers
        self._active: list[tuple[Reading, Future[None]]] = []
        self._readers: dict[str, float] = {}

    def run(self) -> None:
        while self._obey():
            self._active = [one for one in self._active if self._goes_on(*one)]
            self._listen()
            self._reads.reap()
        for reading, answer in self._active:
            reading.close()
            answer.set_exception(TransportError("this worker is at its end"))

    def _obey(self) -> bool:
        """Take queued orders, after a short wait if the thread is idle; return False at the end."""
        wait = _IDLE_S if self._peers else _ALONE_S
        if self._active or self._readers:
            time.sleep(0)  # other threads' turn
            wait = 0.0
        while True:
            try:
                order = self._orders.get(wait > 0, wait)
            except queue.Empty:
                return True
            match order:
                case _Fetch(endpoint, locator, found, answer):
                    if answer.set_running_or_notify_cancel():
                        self._active.append((self._reads.read(endpoint, locator, found), answer))
                case _Forget(endpoint):
                    self._reads.forget(endpoint)
                case _Stop():
                    return False
            wait = 0.0

    def _goes_on(self, reading: Reading, answer: Future[None]) -> bool:
        try:
            next(reading)
        except StopIteration:
            answer.set_result(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the asker's to know
            answer.set_exception(error)
        else:
            return True
        return False

    def _listen(self) -> None:
        now = time.monotonic()
        try:
            heard = self._reads.agent.get_new_notifs()
        except self._reads.errors as error:
            _LOGGER.warning("data plane: NIXL lost notifications: %s", error)
            heard = {}
        for name, words in heard.items():
            if words[-1] == HERE:
                self._readers[name] = now + _READER_S
            elif words[-1] == LEAVING:
                self._readers.pop(name, None)
        self._readers = {name: until for name, until in self._readers.items() if until > now}


def _package() -> ModuleType:
    for name in PACKAGES:
        try:
            package = importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        # NIXL logs much to stdout, in its own format, even without a problem.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return package
    raise ValueError(
        "data_plane.transports has `nixl`, and NIXL is not installed: pip install 'dalsegno[rdma]', "
        "or take `nixl` off that list"
    )


def errors_of(package: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions of NIXL; they have no common base class, only similar names."""
    bindings = vars(package.nixlBind)
    return tuple(
        value for name, value in bindings.items() if name.startswith("nixl") and name.endswith("Error")
    )


def _open(package: ModuleType, arena: Arena, network: str) -> tuple[Any, Any, NixlEndpoint]:
    layout = arena.layout
    config = package.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = package.nixl_agent(f"dalsegno-{layout.epoch:x}", config)
    base = np.frombuffer(arena.backing.memory, np.uint8).ctypes.data
    registered = agent.register_memory([(base, layout.length, 0, "")], mem_type="DRAM")
    metadata = agent.get_agent_metadata()
    return (
        agent,
        registered,
        NixlEndpoint(metadata, base, layout.epoch, layout.length, layout.payload_at, network),
    )


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address, for UCX.

    Raises:
        ValueError: none has it.
    """
    wanted = socket.inet_aton(socket.gethostbyname(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if request.tobytes()[20:24] == wanted:
                return name
    raise ValueError(
        f"data_plane.address {address!r} is on no interface of this machine: set UCX_NET_DEVICES to the one "
        "that NIXL is to use"
    )
