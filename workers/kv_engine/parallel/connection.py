"""A connection between the leader of a shared copy and one follower: messages, whole and in order.

    length (uint32, little-endian) | so many bytes

Used by the engines' threads, which wait. A member that is gone closes it; one whose machine is gone is found
out by the kernel's probes within half a minute, for a leader with nothing to do says nothing for hours.
"""

import socket
import struct
from typing import Final

from shared.errors import WorkerError

MOST_BYTES: Final = 2**28
"""A step is some kilobytes; who says more than this is no member."""
_LENGTH: Final = struct.Struct("<I")
_WHILE_S: Final = 3600.0
"""Who takes nothing for so long is gone; what is said may take longer, and is waited for on."""
_PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""After so many seconds without a word, every so many, so often (Linux)."""


class GroupLostError(WorkerError):
    """A member of a shared copy is gone, and with it the copy: every member's process begins anew."""

    code = "group_lost"


def probe(connection: socket.socket) -> None:
    """Have the kernel ask whether the other end's machine is there, where nothing is said for long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection:
    """One end of the connection; `who` is at the other."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        self.who: Final = who
        self._socket = connection
        # Not `setblocking`: an event loop that looks at it too may have it return at once (uvloop does), and
        # with a timeout it is waited for all the same.
        connection.settimeout(_WHILE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Say it; waits while the other end takes nothing.

        Raises:
            GroupLostError: the other end is gone.
        """
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> bytearray:
        """Wait for what the other end says.

        Raises:
            GroupLostError: it is gone.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise GroupLostError(f"{self.who} announces {length} bytes: expected at most {MOST_BYTES}")
        return self._exactly(length)

    def has_ended(self) -> bool:
        """Whether the other end is gone, without waiting; it has nothing to say otherwise."""
        try:
            # By a socket of its own, which never waits: what is there to read, another thread may read first.
            with self._socket.dup() as looking:
                looking.setblocking(False)
                return not looking.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End it for both; who waits in `receive`, at either end, is told."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster
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
        return GroupLostError(f"{self.who} is gone ({why}); all members of its copy begin anew")
