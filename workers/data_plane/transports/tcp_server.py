"""The serving half of `tcp`: an arena's bytes, for whoever shows the token of this life.

One listening socket on one address, one thread to accept, one for each connection, and a limit to them. Bytes
go from the arena's file into the socket in the kernel (`os.sendfile`); Python sees none of them.

**Who checks when.** `sendfile` does not copy: it queues references to the arena's pages, and what is written
there until the reader has read goes over the wire (tried: all of 256 KB, overwritten after `sendfile` had
returned). So no check of the sender's, however late, says what the reader got. It asks again (CHECK) when it
has all bytes: a generation that holds then held all the while. What is short is copied before it is checked,
and needs no second question.

A request that nobody of ours would send (no frame, a wrong token, a range outside the arena, not the tensor's
length) is answered with its reason, counted and logged, and its connection closed. A tensor that is gone is
normal.

Where all places are taken, whoever has shown no token yet gives way to the next, the oldest first, and then a
reader that has asked for nothing lately, which connects again: strangers keep no worker from being read.
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
"""A stranger that says nothing holds one of few places for so long."""
_IDLE_S: Final = 120.0
"""A reader that comes back later connects again."""
_RESTS_S: Final = 1.0
"""A reader that has asked for nothing for so long gives its place to one that has none."""
_STALLED_S: Final = 10.0
"""A reader that takes nothing for so long is gone."""
_READ_BYTES: Final = 256 * 1024
"""Taken at a time: 64 MB over loopback came at 4.0 GB/s so, and at 2.2 taken in one call."""
_LOST: Final = (ConnectionError, TimeoutError, BlockingIOError)


class TcpServer:
    """Serves one arena's slots until it is closed.

    Attributes:
        address: where it listens: one address, and the port that was asked for or found.
        token: what requests must show; another in each life.
    """

    def __init__(self, source: Source, *, address: str, port: int, max_connections: int = 64) -> None:
        """Listen, and begin to answer.

        Raises:
            ValueError: `address` stands for all addresses of this machine.
            OSError: `address` is not this machine's, or the port is taken.
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
        """How many requests were refused, by the reason they were told; stale ones are not among them."""
        with self._lock:
            return dict(self._refused)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Stop answering; once it returns, no thread reads the arena any more."""
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
                        self._closing.wait(0.1)  # out of descriptors, as a rule: others may give some back
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
        except RuntimeError as error:  # the system's limit of threads: later there may be room again
            self._end(connection)
            self._refuse(connection, Status.BUSY, str(error))
            connection.close()

    def _has_room(self) -> bool:
        """Whether there is a place for one more, or somebody gives up theirs; with the lock held."""
        if len(self._connections) - len(self._leaving) < self._max_connections:
            return True
        if len(self._leaving) >= self._max_connections:
            return False
        last = next(iter(self._strangers), None)
        if last is not None:
            self._note(last, "silent", "it has shown no token, and another waits for its place")
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
        """Whether the connection goes on."""
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
            return self._refuse(connection, Status.WRONG_TOKEN, "it is not this life's")
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
            _LOGGER.debug("data plane: it did not wait to be told: %s", error)
        return False

    def _note(self, connection: socket.socket, name: str, reason: str) -> None:
        """Count and log it; with the lock held."""
        self._refused[name] += 1
        count = self._refused[name]
        if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: a flood of them is no flood of lines
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
    """Blocking, with the kernel's own timeouts: a wait costs no extra call, and one read may take it all."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))
    receive_within(connection, receive_s)


def receive_within(connection: socket.socket, seconds: float) -> None:
    """How long a read may wait for the next byte; then it raises BlockingIOError."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def receive_rest(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`.

    Raises:
        ConnectionError: the connection ended before.
        BlockingIOError: nothing came for as long as a read may wait.
    """
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got : got + _READ_BYTES], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError(f"the connection ended {len(into) - got} bytes too early")
        got += count


def send_both(connection: socket.socket, head: bytes, body: bytes) -> None:
    """Both in one packet, as far as they fit."""
    sent = connection.sendmsg([head, body])
    if sent < len(head) + len(body):
        rest = (head + body)[sent:]
        connection.sendall(rest)


def shut(connection: socket.socket) -> None:
    """Wake whoever waits at it, in any thread; who owns it closes it."""
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
