"""One client connection: uvicorn's, with a time limit for everything that a client can leave unfinished.

    connected ──► head ──► body ──► answer ──► idle ──► head ...
       header_timeout_s    │          │          idle_timeout_s (uvicorn's)
                 body_timeout_s   send_timeout_s
               (gateway.middleware.body_limit)

An unfinished head is answered with 408, one that is too long with 431, a request that is no HTTP with 400,
and a connection above the limit with 503; all errors have the common body. A client that reads nothing of its
answer is disconnected: its answer would hold its place, and its buffered bytes, for ever.

**Lingering close.** Closing a socket while the client still sends would reset it, and the client might never
read the answer. So after an answer that was given before the end of the request, the connection shuts down
its sending side, and reads and discards bytes for a while.

**A client that closes its sending side** gets the answers to the requests that it has sent, and then the
connection is closed. `gateway.http.departure` distinguishes it from one that left.

The server checks the time limits from outside (`HttpConnection.check_timeouts`), a few times within the
shortest of them: one check of thousands of connections costs less than a timer for each phase of each.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway import errors
from gateway.errors import HttpError
from gateway.http import framing
from gateway.http.departure import BEFORE_ANSWER, BETWEEN_CHUNKS, DepartureWatch
from gateway.http.half_closing_transport import HalfClosingTransport
from gateway.http.parser import UpgradeIgnoringParser
from gateway.http.request_head import HOST, NotHttpError, check_head, origin_form
from gateway.middleware import access_log, request_id
from shared.errors import CapacityError, ClientError, DalSegnoError

MAX_HEAD_BYTES: Final = 64 * 1024
_FRAMING_PER_BYTE: Final = 16
"""The framing allowed per body byte. A chunk of one byte has five; more are extensions and trailers."""
LINGERING_CLOSE_S: Final = 5.0
LINGERING_CLOSE_BYTES: Final = 32 * 1024 * 1024


class HeadTimeoutError(ClientError):
    """The head of a request did not arrive in time."""

    code = "header_timeout"
    status = 408


class HeadTooLargeError(ClientError):
    """The head of a request is too long."""

    code = "headers_too_large"
    status = 431


class TooManyConnectionsError(CapacityError):
    """The gateway has its maximum number of connections."""

    code = "too_many_connections"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The maximum number of connections, and time limits in seconds.

    `logs_requests`: log a line for each request that is refused here, before it reaches the application.
    `websockets`: connections may become WebSockets, which uvicorn serves from then on.
    `on_refusal`: called with the error of each of those requests, and with its name in the response.
    """

    connections: int
    header_timeout_s: float
    send_timeout_s: float
    logs_requests: bool = True
    websockets: bool = False
    on_refusal: Callable[[DalSegnoError, str], None] | None = None

    @property
    def check_every_s(self) -> float:
        return min(1.0, max(0.01, min(self.header_timeout_s, self.send_timeout_s) / 4))


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits: see the module."""

    client_transport: HalfClosingTransport

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
        self.parser = cast(
            "httptools.HttpRequestParser", UpgradeIgnoringParser(self, takes_websockets=limits.websockets)
        )
        self._limits = limits
        self._head_since_s: float | None = None
        self._head_bytes = 0
        self._heads_begun = 0
        self._body_bytes = 0
        self._framing_bytes = 0
        self._fault: ClientError | None = None
        self._lingering_since_s: float | None = None
        self._discarded_bytes = 0
        self._stalled_since_s: float | None = None
        self._sent_bytes = 0
        self._departure: DepartureWatch | None = None

    # ---- called by the event loop --------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        self.client_transport = HalfClosingTransport(transport)
        super().connection_made(cast("asyncio.Transport", self.client_transport))
        self._head_since_s = time.monotonic()
        if len(self.connections) > self._limits.connections:
            self._refuse(
                TooManyConnectionsError(
                    f"{self._limits.connections} connections are open, which is the limit; try again later"
                )
            )

    def data_received(self, data: bytes) -> None:
        if self.client_transport.is_lingering:
            self._discard(len(data))
            return
        begins_in_head = self._head_since_s is not None or not self.client_transport.request_is_open
        self._heads_begun = 0
        body_bytes = self._body_bytes
        super().data_received(data)
        if not begins_in_head and not self._heads_begun:
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > MAX_HEAD_BYTES + _FRAMING_PER_BYTE * self._body_bytes:
                self._refuse(
                    NotHttpError(
                        "the framing of this body is larger than its contents: expected larger chunks"
                    )
                )
                return
        if self._head_since_s is None:
            if (
                not self._is_answering
                and not self.client_transport.request_is_open
                and self.timeout_keep_alive_task is None
            ):
                # An empty line before a head: none of uvicorn's timers runs.
                self._head_since_s = time.monotonic()
            return
        if begins_in_head and self._heads_begun <= 1:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.client_transport.is_closing():
            self._refuse(_head_too_large())

    def eof_received(self) -> bool:  # type: ignore[override] # True: the transport stays open
        if self.client_transport.is_closing():
            return False
        is_unanswered = self._is_answering or self._head_since_s is not None
        if self.client_transport.request_is_open and is_unanswered:
            self._refuse(NotHttpError("the connection was closed before the end of the request"), at_end=True)
            return False
        if not self._is_answering:
            return False
        self.cycle.keep_alive = False
        self._departure = DepartureWatch(self.client_transport, self.loop)
        if self.scope["http_version"] == "1.0" or self.pipeline:
            return True
        if not self.cycle.response_started:
            self._departure.probe(BEFORE_ANSWER)
        elif self.cycle.chunked_encoding:
            self._departure.probe(BETWEEN_CHUNKS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_since_s = None
        super().connection_lost(exc)

    # ---- called by the parser ------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since_s, self._head_bytes = time.monotonic(), 0
        self._heads_begun += 1
        self._body_bytes = self._framing_bytes = 0
        self.client_transport.request_is_open = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_since_s is not None:  # trailers after a body are not headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_since_s = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._fault = _head_too_large()
            raise self._fault  # stops the parser
        version = self.parser.get_http_version()
        try:
            check_head(version, self.headers)
        except ClientError as error:
            self._fault = error
            raise
        self.url, host = origin_form(self.url)
        if host is not None:
            self.headers[:] = [(HOST, host), *(field for field in self.headers if field[0] != HOST)]
        super().on_headers_complete()
        if version == "1.0":
            framing.end_by_close(self.cycle)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))

    def on_message_complete(self) -> None:
        self.client_transport.request_is_open = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        wrong = NotHttpError("this is no HTTP request that can be read; expected HTTP/1.1")
        self._refuse(self._fault or wrong)

    # ---- time ----------------------------------------------------------------------------------------
    def check_timeouts(self, now_s: float) -> None:
        """Apply the time limits at `now_s`, a time of `time.monotonic`."""
        if self._departure is not None:
            self._departure.check()
        if (
            self._lingering_s(now_s) > LINGERING_CLOSE_S
            or self._stalled_s(now_s) > self._limits.send_timeout_s
        ):
            self.client_transport.transport.abort()
        elif self._is_answering or self.client_transport.is_closing() or self._head_since_s is None:
            return
        elif now_s - self._head_since_s > self._limits.header_timeout_s:
            self._give_up_on_head()

    @property
    def _is_answered(self) -> bool:
        """True after the answer to the last request."""
        cycle = cast(
            "RequestResponseCycle | None", self.cycle
        )  # None before the first, whatever uvicorn says
        return cycle is not None and cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self._is_answered

    def _lingering_s(self, now_s: float) -> float:
        """The seconds for which the rest of a request has been discarded."""
        if not self.client_transport.is_lingering and not (
            self._is_answered and self.client_transport.request_is_open and self._head_since_s is None
        ):
            self._lingering_since_s, self._discarded_bytes = None, 0
            return 0.0
        if self._lingering_since_s is None:
            self._lingering_since_s = now_s
        return now_s - self._lingering_since_s

    def _stalled_s(self, now_s: float) -> float:
        """The seconds for which the client has read nothing of the bytes written for it."""
        taken = self.client_transport.sent_bytes
        waits = self.flow.write_paused or self.client_transport.is_closing()
        if (
            self._stalled_since_s is None
            or not waits
            or not self.client_transport.pending_bytes
            or taken > self._sent_bytes
        ):
            self._stalled_since_s, self._sent_bytes = now_s, taken
        return now_s - self._stalled_since_s

    def _give_up_on_head(self) -> None:
        if not self._head_bytes and not self.client_transport.request_is_open:
            self.client_transport.transport.close()  # no request was started
            return
        self._refuse(
            HeadTimeoutError(
                f"the head of the request did not arrive within {self._limits.header_timeout_s:g} s"
            )
        )

    def _discard(self, size_bytes: int) -> None:
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > LINGERING_CLOSE_BYTES:
            self.client_transport.transport.abort()

    # ---- an answer without a request -------------------------------------------------------------------
    def _refuse(self, error: ClientError | CapacityError, *, at_end: bool = False) -> None:
        """Send an error without the application, and close; `at_end`: the client sends nothing more."""
        if self._is_answering:
            if self.cycle.response_started or self.pipeline:
                self.client_transport.transport.abort()  # an error cannot be sent within an answer
                return
            self.cycle.disconnected = True  # so that the application, which waits for the body, sends nothing
            self.cycle.message_event.set()
        name = request_id.new_name()
        answer = _written(errors.of_exception(error), name)
        if self._limits.logs_requests:
            access_log.log_refusal(error, name, self.client, len(answer))
        if self._limits.on_refusal is not None:
            self._limits.on_refusal(error, name)
        self.client_transport.request_is_open = not at_end
        self.client_transport.write(answer)
        self.client_transport.close()


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(f"the head of the request is too large: expected at most {MAX_HEAD_BYTES} bytes")


def _written(error: HttpError, name: str) -> bytes:
    body = error.json("")  # no path is known yet
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        request_id.HEADER: name,
        **error.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body
