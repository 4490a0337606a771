"""TCP: reads from any worker that the network reaches. The reader requests, the owner sends.

The owner listens on one address (`tcp_server`) and puts the address into its endpoint, with a token that is
new in each incarnation. The reader keeps a few connections to each peer, each with a thread, and receives
straight into resident memory (`fetch_buffers`). The result is a private copy.

Nothing is encrypted: the token prevents reading, but not eavesdropping. On a shared network, use a separate
address for the data plane, or a tunnel.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Final

import msgspec

from shared.errors import TensorGone
from workers.data_plane.memory.source import Source
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, Peer, TransportError
from workers.data_plane.transports import tcp_frames as frames
from workers.data_plane.transports.endpoints import decode_endpoint, own_network
from workers.data_plane.transports.fetch_buffers import FetchBuffers
from workers.data_plane.transports.tcp_frames import Request, Status
from workers.data_plane.transports.tcp_server import TcpServer, prepare, receive_rest, shut

_LOGGER: Final = logging.getLogger(__name__)

_CONNECT_S: Final = 2.0
_STALLED_S: Final = 5.0
"""The time limit for the next bytes of a peer."""
_CONNECTIONS: Final = 4
"""Connections to one peer; further reads wait for one of them."""


class TcpEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The address that an incarnation listens at.

    Attributes:
        token: what a request must show.
        network: which machine's loopback it is; only those of the same reach a loopback address.
    """

    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    network: str


class TcpTransport:
    """Serves an arena, and reads from other workers' arenas."""

    name: Final = "tcp"

    def __init__(
        self,
        source: Source,
        buffers: FetchBuffers,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        stalled_s: float = _STALLED_S,
    ) -> None:
        """Listen; port 0 is any free one.

        Raises:
            ValueError: `address` stands for all addresses of this machine.
            OSError: `address` is not one of this machine, or the port is taken.
        """
        self._buffers = buffers
        self._stalled_s = stalled_s
        self._links: dict[tuple[int, int], _Link] = {}
        self.server = TcpServer(source, address=address, port=port)
        where, found = self.server.address
        self._endpoint = msgspec.msgpack.encode(TcpEndpoint(where, found, self.server.token, own_network()))

    @property
    def refused(self) -> int:
        """The number of invalid requests."""
        return sum(self.server.refused.values())

    def endpoint(self) -> bytes:
        return self._endpoint

    def reaches(self, peer: Peer) -> bool:
        endpoint = _read(peer.endpoint)
        return endpoint is not None and (
            not _is_loopback(endpoint.address) or endpoint.network == own_network()
        )

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        # Not as the thread's result, which would keep the memory alive longer than its reader does.
        found: list[Bytes] = []
        await asyncio.wrap_future(self._link(peer).submit(locator, found))
        return found.pop()

    def check(self, peer: Peer, locator: Locator) -> None:
        """Nothing to check: a copy stays valid."""

    def forget(self, peer: Peer) -> None:
        link = self._links.pop((peer.rank, peer.incarnation), None)
        if link is not None:
            link.close()

    async def close(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.close()
        await asyncio.to_thread(self._end, links)

    def _end(self, links: list["_Link"]) -> None:
        self.server.close()
        for link in links:
            link.wait()

    def _link(self, peer: Peer) -> "_Link":
        key = (peer.rank, peer.incarnation)
        if key not in self._links:
            endpoint = _read(peer.endpoint)
            if endpoint is None:
                raise TransportError(f"rank {peer.rank} has no tcp endpoint that can be decoded")
            self._links[key] = _Link(peer, endpoint, self._buffers, self._stalled_s)
        return self._links[key]


class _Link:
    """The connections to one incarnation of a peer, and the threads that wait on them."""

    def __init__(self, peer: Peer, endpoint: TcpEndpoint, buffers: FetchBuffers, stalled_s: float) -> None:
        self._who = f"rank {peer.rank} at {endpoint.address}:{endpoint.port}"
        self._endpoint = endpoint
        self._buffers = buffers
        self._stalled_s = stalled_s
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="tcp-fetch")
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._stalled_at = 0.0

    def submit(self, locator: Locator, found: list[Bytes]) -> Future[None]:
        return self._threads.submit(self._fetch, locator, found, time.monotonic())

    def close(self) -> None:
        """Wake the threads that wait on a connection; they report that the peer is gone."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                shut(connection)
            idle = list(self._idle)
            self._idle.clear()
        for connection in idle:
            self._drop(connection)
        self._threads.shutdown(wait=False)

    def wait(self) -> None:
        self._threads.shutdown(wait=True)

    # ---- in a thread -----------------------------------------------------------------------------------

    def _fetch(self, at: Locator, found: list[Bytes], asked_at: float) -> None:
        if asked_at < self._stalled_at:  # queued reads do not repeat the wait one after the other
            raise TransportError(
                f"{self._who}: no byte came for {self._stalled_s} s, to one who asked before"
            )
        try:
            asked = frames.pack_request(Request(frames.READ, at, self._endpoint.token))
        except frames.FrameError as error:
            raise TensorGone(f"{self._who} has no such slot: {error}") from error
        into = self._buffers.take(at.nbytes)
        while True:
            connection, is_fresh = self._take()
            try:
                status = self._read(connection, asked, at, into.data)
            except ConnectionError as error:
                self._drop(connection)
                if is_fresh or self._is_closed:
                    raise TransportError(f"{self._who}: {error}") from error
                # The peer may have closed an idle connection; that is no error now.
            except BlockingIOError as error:
                self._stalled_at = time.monotonic()
                self._drop(connection)
                raise TransportError(f"{self._who}: no byte came for {self._stalled_s} s") from error
            except (OSError, frames.FrameError) as error:
                self._drop(connection)
                raise TransportError(f"{self._who}: {error}") from error
            else:
                break
        if status in (Status.HELD, Status.STALE):
            self._keep(connection)
        else:
            self._drop(connection)
        if status is not Status.HELD:
            raise self._refusal(status, at)
        into.flags.writeable = False
        found.append(into)

    def _refusal(self, status: Status, at: Locator) -> TensorGone | TransportError:
        reason = status.name.lower().replace("_", " ")
        if status in (Status.STALE, Status.OUT_OF_RANGE, Status.WRONG_LENGTH):
            return TensorGone(f"{self._who} does not have {at} (any more): {reason}")
        return TransportError(f"{self._who} refuses to be read: {reason}")

    def _read(self, connection: socket.socket, asked: bytes, at: Locator, into: memoryview) -> Status:
        connection.sendall(asked)
        head = bytearray(frames.REPLY_BYTES)
        got = connection.recvmsg_into([head, into])[0]
        if got < len(head):
            receive_rest(connection, memoryview(head)[got:])
            got = len(head)
        status, nbytes = frames.unpack_reply(head)
        if status is not Status.HELD:
            return status
        if nbytes != at.nbytes:
            raise frames.FrameError(f"expected {at.nbytes} bytes to follow, found {nbytes}")
        receive_rest(connection, into[got - len(head) :])
        if at.nbytes <= frames.WHOLE_BYTES:
            return status
        connection.sendall(frames.pack_request(Request(frames.CHECK, at, self._endpoint.token)))
        receive_rest(connection, memoryview(head))
        return frames.unpack_reply(head)[0]

    # ---- connections -----------------------------------------------------------------------------------

    def _take(self) -> tuple[socket.socket, bool]:
        with self._lock:
            if self._is_closed:
                raise TransportError(f"{self._who}: its life is over, or this worker's")
            if self._idle:
                return self._idle.pop(), False
        try:
            connection = socket.create_connection((self._endpoint.address, self._endpoint.port), _CONNECT_S)
            prepare(connection, send_s=self._stalled_s, receive_s=self._stalled_s)
        except (OSError, ValueError) as error:  # ValueError: an invalid scope of an IPv6 address
            raise TransportError(f"{self._who} does not answer: {error}") from error
        self._begin(connection)
        return connection, True

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
            if self._is_closed:
                shut(connection)

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _read(endpoint: bytes) -> TcpEndpoint | None:
    if (read := decode_endpoint(endpoint, TcpEndpoint)) is None:
        return None
    try:
        ipaddress.ip_address(read.address)
    except ValueError as error:
        _LOGGER.warning("data plane: a TcpEndpoint that cannot be read: %s", error)
        return None
    return read
