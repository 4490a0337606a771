"""The serving half of `tcp`: sends an arena's bytes to readers that present the token of this incarnation.

It has one listening socket on one address, one accepting thread, and one thread per connection, up to a
limit. The bytes go from the arena's file into the socket in the kernel (`os.sendfile`), not through Python.

**Who checks when.** `sendfile` does not copy: it queues references to the arena's pages, and later writes to
the pages are sent until the reader has read them (tested: all of 256 KB, overwritten after `sendfile` had
returned). So no check by the sender, however late, covers what the reader received. The reader asks again
(CHECK) when it has all bytes: a generation that is still valid then was valid throughout. Short tensors are
copied before the check, and need no second request.

An invalid request (no frame, a wrong token, a range outside the arena, a wrong length) is answered with its
reason, counted and logged, and its connection is closed. A tensor that is gone is normal.

When all connections are in use, the oldest one without a token yields to a new one; then a reader without a
recent request yields, which connects again. So strangers cannot prevent a worker from being read.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from typing import Final

from workers.data_plane.memory.source import Source
from workers.data_plane.transport import Locator
from workers.data_plane.transports import tcp_frames as frames
from workers.data_plane.transports.tcp_frames import Status

_LOGGER: Final = logging.getLogger(__name__)

_FIRST_REQUEST_S: Final = 5.0
"""The time limit for the first request of a connection."""
_IDLE_S: Final = 120.0
"""The time limit between requests; a reader that returns later connects again."""
_RESTS_S: Final = 1.0
"""A connection without a request for this time yields to a new one when all are in use."""
_STALLED_S: Final = 10.0
"""The time limit for a reader to take bytes."""
_READ_BYTES: Final = 256 * 1024
"""The most bytes per call: 64 MB over loopback arrived at 4.0 GB/s this way, and at 2.2 GB/s in one call."""
_LOST: Final = (ConnectionError, TimeoutError, BlockingIOError)


class TcpServer:
    """Serves one arena's slots until it is closed.

    Attributes:
        address: the listening address and port.
        token: required in each request; new in each incarnation.
    """

    def __init__(self, source: Source, *, address: str, port: int, max_connections: int = 64) -> None:
        """Listen, and start to serve.

        Raises:
            ValueError: `address` stands for all addresses of this machine.
            OSError: `address` is not one of this machine, or the port is taken.
        """
        self.token = secrets.token_bytes(frames.TOKEN_BYTES)
        self._source = source
        self._max_connections = max_connections
        self._listener = _listen(address, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # no token yet; the oldest first
        self._resting: dict[socket.socket, float] = {}  # since when no request; the longest first
        self._leaving: set[socket.socket] = set()  # have given way, and are about to end
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._acceptor.start()

    @property
    def refused(self) -> dict[str, int]:
        """The number of refused requests, by reason; stale ones are not counted."""
        with self._lock:
            return dict(self._refused)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Stop serving; after it returns, no thread reads the arena."""
        self._closing.set()
        shut(self._listener)
        self._acceptor.join()
        with self._lock:
            open_ones = dict(self._connections)
        for connection in open_ones:
            shut(connection)
        for thread in open_ones.values():
            thread.join()

    # ---- connections -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closing.is_set():
                        _LOGGER.warning("data plane: cannot take a connection: %s", error)
                        self._closing.wait(0.1)  # usually out of descriptors, which others may release
                    continue
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="tcp-serve", daemon=True)
        with self._lock:
            has_room = self._has_room()
            if has_room:
                self._connections[connection] = thread
                self._strangers[connection] = None
        if not has_room:
            self._refuse(connection, Status.BUSY, f"{self._max_connections} connections are open")
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError as error:  # the system's limit of threads; a later attempt may succeed
            self._end(connection)
            self._refuse(connection, Status.BUSY, str(error))
            connection.close()

    def _has_room(self) -> bool:
        """Return True if there is room for a connection, or another one yields. Call with the lock held."""
        if len(self._connections) - len(self._leaving) < self._max_connections:
            return True
        if len(self._leaving) >= self._max_connections:
            return False
        last = next(iter(self._strangers), None)
        if last is not None:
            self._note(last, "silent", "no token, and another connection needs its place")
        else:
            last, since = next(iter(self._resting.items()), (None, 0.0))
            if last is None or time.monotonic() - since < _RESTS_S:
                return False
        self._strangers.pop(last, None)
        self._resting.pop(last, None)
        self._leaving.add(last)
        shut(last)
        return True

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            del self._connections[connection]
            self._strangers.pop(connection, None)
            self._resting.pop(connection, None)
            self._leaving.discard(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            prepare(connection, send_s=_STALLED_S, receive_s=_FIRST_REQUEST_S)
            if self._answer_next(connection):
                receive_within(connection, _IDLE_S)
                while self._answer_next(connection):
                    pass
        except _LOST as error:
            _LOGGER.debug("data plane: a reader is gone: %s", error)
        except OSError as error:
            if not self._closing.is_set():
                _LOGGER.warning("data plane: serving a reader failed: %s", error)
        finally:
            self._end(connection)
            connection.close()

    def _answer_next(self, connection: socket.socket) -> bool:
        """Answer one request; return True if the connection stays open."""
        head = bytearray(frames.REQUEST_BYTES)
        count = connection.recv_into(head)
        if count == 0:
            return False
        with self._lock:
            self._resting.pop(connection, None)
        receive_rest(connection, memoryview(head)[count:])
        try:
            verb, locator, token = frames.unpack_request(head)
        except frames.FrameError as error:
            return self._refuse(connection, Status.MALFORMED, str(error))
        if not hmac.compare_digest(token, self.token):
            return self._refuse(connection, Status.WRONG_TOKEN, "it is not this incarnation's")
        with self._lock:
            self._strangers.pop(connection, None)
        status, reason = self._judge(locator)
        if status is Status.HELD and verb == frames.READ:
            self._send(connection, locator)
        elif status in (Status.HELD, Status.STALE):
            connection.sendall(frames.pack_reply(status))
        else:
            return self._refuse(connection, status, reason)
        with self._lock:
            if connection not in self._leaving:
                self._resting[connection] = time.monotonic()
        return True

    def _judge(self, at: Locator) -> tuple[Status, str]:
        try:
            length = self._source.length(at.segment)
        except LookupError:
            return Status.OUT_OF_RANGE, f"there is no segment {at.segment}"
        if at.offset + at.nbytes > length:
            asked = f"bytes {at.offset} to {at.offset + at.nbytes}"
            return Status.OUT_OF_RANGE, f"{asked} of a segment that has {length}"
        slot = self._source.slot(at.segment, at.offset)
        if slot is None or slot.generation != at.generation:
            return Status.STALE, ""
        if at.nbytes != slot.nbytes:
            return Status.WRONG_LENGTH, f"{at.nbytes} bytes of a tensor that has {slot.nbytes}"
        return Status.HELD, ""

    # ---- what is sent ----------------------------------------------------------------------------------

    def _send(self, connection: socket.socket, at: Locator) -> None:
        if at.nbytes > frames.WHOLE_BYTES:
            self._send_file(connection, at)
            return
        copy = os.pread(self._source.descriptor(at.segment), at.nbytes, at.offset)
        status, _ = self._judge(at)
        if status is not Status.HELD:
            connection.sendall(frames.pack_reply(Status.STALE))
            return
        send_both(connection, frames.pack_reply(status, at.nbytes), copy)

    def _send_file(self, connection: socket.socket, at: Locator) -> None:
        descriptor = self._source.descriptor(at.segment)
        connection.sendall(frames.pack_reply(Status.HELD, at.nbytes), socket.MSG_MORE)
        sent = 0
        while sent < at.nbytes:
            count = os.sendfile(connection.fileno(), descriptor, at.offset + sent, at.nbytes - sent)
            if count == 0:
                raise ConnectionError(
                    f"the arena's file ended {at.nbytes - sent} bytes before the tensor did"
                )
            sent += count

    # ---- what is refused -------------------------------------------------------------------------------

    def _refuse(self, connection: socket.socket, status: Status, reason: str) -> bool:
        with self._lock:
            self._note(connection, status.name.lower(), reason)
        try:
            connection.sendall(frames.pack_reply(status))
        except OSError as error:
            _LOGGER.debug("data plane: a refused reader has left: %s", error)
        return False

    def _note(self, connection: socket.socket, name: str, reason: str) -> None:
        """Count and log a refusal. Call with the lock held."""
        self._refused[name] += 1
        count = self._refused[name]
        if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: the log is not flooded
            name, who = name.replace("_", " "), _peer(connection)
            _LOGGER.warning(
                "data plane: refused a request of %s: %s: %s (%d so far)", who, name, reason, count
            )


def _listen(address: str, port: int) -> socket.socket:
    if address in ("", "0.0.0.0", "::", "*"):  # noqa: S104 - this refuses it
        raise ValueError(
            f"the data plane cannot listen on {address!r}, all addresses of this machine: "
            "expected the one by which other workers reach it"
        )
    family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


# ---- sockets, for both halves ------------------------------------------------------------------------------


def prepare(connection: socket.socket, *, send_s: float, receive_s: float) -> None:
    """Make a socket blocking, with the kernel's time limits: no extra call per wait, and whole reads."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))
    receive_within(connection, receive_s)


def receive_within(connection: socket.socket, seconds: float) -> None:
    """Set the time limit for the next byte of a read; then it raises BlockingIOError."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def receive_rest(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`.

    Raises:
        ConnectionError: the connection ended early.
        BlockingIOError: no byte arrived within the time limit.
    """
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got : got + _READ_BYTES], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError(f"the connection ended {len(into) - got} bytes too early")
        got += count


def send_both(connection: socket.socket, head: bytes, body: bytes) -> None:
    """Send both in one packet if they fit."""
    sent = connection.sendmsg([head, body])
    if sent < len(head) + len(body):
        rest = (head + body)[sent:]
        connection.sendall(rest)


def shut(connection: socket.socket) -> None:
    """Wake the threads that wait on the socket; its owner closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        _LOGGER.debug("data plane: closed already: %s", error)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))


def _peer(connection: socket.socket) -> str:
    try:
        return ":".join(str(part) for part in connection.getpeername()[:2])
    except OSError:
        return "a reader that is gone"
