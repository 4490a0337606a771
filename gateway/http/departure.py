"""The detection of a client that left, once its end of the stream was received.

A client that closes its connection, and one that only closes its sending side and waits for the answer, send
the same: the end of the stream. They differ when something is sent to them: the one that left answers with a
reset. So the connection sends what no client takes for a part of the answer: before it, an interim answer
(`100 Continue`), which every client must skip; within it, a zero before the size of the next chunk.

The reset is found in the socket's error: an event loop does not watch a socket that it neither reads nor
writes.
"""

import asyncio
import socket
from typing import Final

from gateway.http.half_closing_transport import HalfClosingTransport

BEFORE_ANSWER: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
BETWEEN_CHUNKS: Final = b"0"
_CHECKS_S: Final = (0.002, 0.02, 0.2)
"""Times after the probe; later checks come with the connection's time limits."""
_KEEPALIVE_S: Final = 15
"""The kernel's own probes find clients that leave later, or speak HTTP/1.0, within about a minute."""


class DepartureWatch:
    """The watch over one client whose end of the stream was received."""

    def __init__(self, transport: HalfClosingTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_S)

    def probe(self, data: bytes) -> None:
        """Send `data`, and look for its effect."""
        self._transport.write(data)
        for seconds in _CHECKS_S:
            self._loop.call_later(seconds, self.check)

    def check(self) -> None:
        """Abort the connection if the client has left."""
        if self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.transport.abort()
