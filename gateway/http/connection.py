"""One connection: uvicorn's, with an end to everything that a client can leave unfinished.

    connected ──► head ──► body ──► answer ──► idle ──► head ...
       header_timeout_s    │          │          idle_timeout_s (uvicorn's)
                 body_timeout_s   send_timeout_s
               (gateway.middleware.body_limit)

A head that does not end is answered with 408, one that is too long with 431, what is no HTTP with 400, and a
connection too many with 503: each as every error is. A client that takes nothing of its answer is cut off:
its answer would hold its place among those that are given, and what is written for it, for ever.

**Closing** a socket while its client still sends would reset it, and the client might never read the answer
that says why. So when an answer was given before the request was read whole, the connection says that it has
ended, and reads on for a while, throwing away what comes.

Time is looked at from outside (`Connection.look`), a few times in the shortest of the timeouts: one look at
thousands of connections costs less than a timer for each of their phases.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway import errors
from gateway.errors import HttpError
from gateway.http.parser import Parser
from shared.errors import CapacityError, ClientError

_LOGGER: Final = logging.getLogger(__name__)
MAX_HEAD_BYTES: Final = 64 * 1024
_FRAMING_PER_BYTE: Final = 16
"""A byte in a chunk of its own has five around it. What there is beyond are extensions and trailers."""
LINGER_S: Final = 5.0
LINGER_BYTES: Final = 32 * 1024 * 1024
_PHRASES: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class HeadTimeoutError(ClientError):
    """The head of a request did not come."""

    code = "header_timeout"
    status = 408


class HeadTooLargeError(ClientError):
    """The head of a request is longer than any is."""

    code = "headers_too_large"
    status = 431


class NotHttpError(ClientError):
    """What came is no request."""

    code = "invalid_http"


class TooManyConnectionsError(CapacityError):
    """As many connections are open as this gateway keeps."""

    code = "too_many_connections"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may leave unfinished, and for how long; seconds."""

    connections: int
    header_timeout_s: float
    send_timeout_s: float

    @property
    def look_every_s(self) -> float:
        return min(1.0, max(0.01, min(self.header_timeout_s, self.send_timeout_s) / 4))


class Wire:
    """The transport that uvicorn writes to: it knows how much was taken, and closes without a reset.

    Attributes:
        lingers: our side has ended, and what comes is thrown away.
        owes: whether the client has still to send a part of its request.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.lingers = False
        self.owes = False
        self._written_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """What is written and not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def taken_bytes(self) -> int:
        """What the client's side of the network has taken so far."""
        return self._written_bytes - self.pending_bytes

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self.lingers or self.transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self.owes:
            self.transport.close()
            return
        self.lingers = True
        self.transport.write_eof()  # behind what is still to be taken
        self.transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's."""
        return getattr(self.transport, name)


class Connection(HttpToolsProtocol):
    """See the module."""

    wire: Wire

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = cast("httptools.HttpRequestParser", Parser(self))
        self._limits = limits
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._heads_begun = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._fault: ClientError | None = None
        self._lingers_since_s: float | None = None
        self._thrown_bytes = 0
        self._stalled_since_s: float | None = None
        self._taken_bytes = 0

    # ---- called by the event loop --------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        self.wire = Wire(transport)
        super().connection_made(cast("asyncio.Transport", self.wire))
        self._head_since_s = time.monotonic()
        if len(self.connections) > self._limits.connections:
            self._refuse(
                TooManyConnectionsError(
                    f"{self._limits.connections} connections are open, and no more are taken; try again later"
                )
            )

    def data_received(self, data: bytes) -> None:
        if self.wire.lingers:
            self._throw_away(len(data))
            return
        begins_in_head = self._head_since_s is not None or not self.wire.owes
        self._heads_begun = 0
        body_bytes = self._body_bytes
        super().data_received(data)
        if not begins_in_head and not self._heads_begun:
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > MAX_HEAD_BYTES + _FRAMING_PER_BYTE * self._body_bytes:
                self._refuse(NotHttpError("there is more around the chunks of this body than in them"))
                return
        if self._head_since_s is None:
            if not self._is_answering and not self.wire.owes and self.timeout_keep_alive_task is None:
                self._head_since_s = (
                    time.monotonic()
                )  # an empty line before a head: no timer of uvicorn's runs
            return
        if begins_in_head and self._heads_begun <= 1:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.wire.is_closing():
            self._refuse(_head_too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_since_s = None
        super().connection_lost(exc)

    # ---- called by the parser ------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since_s, self._head_bytes = time.monotonic(), 0
        self._heads_begun += 1
        self._body_bytes = self._framing_bytes = 0
        self.wire.owes = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_since_s is not None:  # what comes behind a body is no header, and nobody waits for it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_since_s = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._fault = _head_too_large()
            raise self._fault  # to the parser, which stops
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._throw_away(len(body))

    def on_message_complete(self) -> None:
        self.wire.owes = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        wrong = NotHttpError("this is no HTTP request that can be read; expected HTTP/1.1")
        self._refuse(self._fault or wrong)

    # ---- time ----------------------------------------------------------------------------------------
    def look(self, now_s: float) -> None:
        """End what has taken too long at `now_s`, a time of `time.monotonic`."""
        if self._lingering_s(now_s) > LINGER_S or self._stalled_s(now_s) > self._limits.send_timeout_s:
            self.wire.transport.abort()
        elif self._is_answering or self.wire.is_closing() or self._head_since_s is None:
            return
        elif now_s - self._head_since_s > self._limits.header_timeout_s:
            self._give_up_on_head()

    @property
    def _is_answered(self) -> bool:
        """Whether there was a request, and the last one has its answer."""
        cycle = cast(
            "RequestResponseCycle | None", self.cycle
        )  # None before the first, whatever uvicorn says
        return cycle is not None and cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self._is_answered

    def _lingering_s(self, now_s: float) -> float:
        """For how long the rest of a request has been thrown away."""
        if not self.wire.lingers and not (
            self._is_answered and self.wire.owes and self._head_since_s is None
        ):
            self._lingers_since_s, self._thrown_bytes = None, 0
            return 0.0
        if self._lingers_since_s is None:
            self._lingers_since_s = now_s
        return now_s - self._lingers_since_s

    def _stalled_s(self, now_s: float) -> float:
        """For how long the client has taken nothing of what is there for it."""
        taken = self.wire.taken_bytes
        waits = self.flow.write_paused or self.wire.is_closing()
        if (
            self._stalled_since_s is None
            or not waits
            or not self.wire.pending_bytes
            or taken > self._taken_bytes
        ):
            self._stalled_since_s, self._taken_bytes = now_s, taken
        return now_s - self._stalled_since_s

    def _give_up_on_head(self) -> None:
        if not self._head_bytes and not self.wire.owes:
            self.wire.transport.close()  # it has asked nothing
            return
        self._refuse(
            HeadTimeoutError(
                f"the head of the request did not come within {self._limits.header_timeout_s:g} s"
            )
        )

    def _throw_away(self, size_bytes: int) -> None:
        self._thrown_bytes += size_bytes
        if self._thrown_bytes > LINGER_BYTES:
            self.wire.transport.abort()

    # ---- an answer without a request -------------------------------------------------------------------
    def _refuse(self, error: ClientError | CapacityError) -> None:
        """Answer, where no application can, and close."""
        if self._is_answering:
            if self.cycle.response_started or self.pipeline:
                self.wire.transport.abort()  # an answer is under way: nothing can be said in its middle
                return
            self.cycle.disconnected = True  # the application, which waits for the body, says nothing then
            self.cycle.message_event.set()
        _LOGGER.debug("%s: %s", self.client, error.message)
        self.wire.owes = True  # who knows what it still sends
        self.wire.write(_written(errors.of_exception(error)))
        self.wire.close()


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(f"the head of a request may have {MAX_HEAD_BYTES} bytes; this one has more")


def _written(error: HttpError) -> bytes:
    body = error.json
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n{head}\r\n".encode() + body
