"""A connection between the leader of a tensor-parallel group and one follower: whole messages, in order.

    length (uint32, little-endian) | that many bytes

The engine threads use it with blocking calls. It is closed when a member's process ends. If a member's
machine is lost, the kernel's keepalive probes find out within half a minute, because an idle leader may send
nothing for hours.
"""

import socket
import struct
from typing import Final

from shared.errors import WorkerError

MAX_MESSAGE_BYTES: Final = 2**28
"""A step has some kilobytes; a longer message does not come from a member."""
_LENGTH: Final = struct.Struct("<I")
_IO_TIMEOUT_S: Final = 3600.0
"""A peer that accepts no data for this long is considered lost. Reads continue after it."""
_PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds of silence before the first probe, seconds between probes, number of probes (Linux)."""


class GroupLostError(WorkerError):
    """A member of a tensor-parallel group is lost, and the group with it: all its processes restart."""

    code = "group_lost"


def probe(connection: socket.socket) -> None:
    """Enable keepalive probes, which detect the loss of the peer's machine on an idle connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection:
    """One end of a connection; `peer` describes the other end."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer: Final = peer
        self._socket = connection
        # Not `setblocking`: an event loop that watches the socket may make it non-blocking (uvloop does).
        # With a timeout, Python waits in either case.
        connection.settimeout(_IO_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message; block while the peer accepts no data.

        Raises:
            GroupLostError: the peer is lost.
        """
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> bytearray:
        """Wait for the next message.

        Raises:
            GroupLostError: the peer is lost.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise GroupLostError(
                f"{self.peer} announces {length} bytes: expected at most {MAX_MESSAGE_BYTES}"
            )
        return self._exactly(length)

    def has_ended(self) -> bool:
        """Return True if the peer is lost, without blocking."""
        try:
            # Peek with a non-blocking duplicate: another thread may read pending data first.
            with self._socket.dup() as duplicate:
                duplicate.setblocking(False)
                return not duplicate.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection for both ends; blocked calls of `receive` at either end raise."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer closed it first
        finally:
            self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                read = self._socket.recv_into(view[done:])
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not read:
                raise self._lost("the connection is closed")
            done += read
        return data

    def _lost(self, why: object) -> GroupLostError:
        return GroupLostError(f"{self.peer} is gone ({why}); its whole group restarts")
