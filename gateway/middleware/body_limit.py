"""Middleware for request bodies: their size, the time they may take, and bodies that were not read.

A body is refused by its Content-Length, or once it is too long or too late. An answer that is given before
the body was read closes the connection.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import ErrorResponse
from gateway.middleware.exchange import Exchange, Middleware, header
from shared.errors import CapacityError, ClientError

SLOWEST_BYTES_PER_S: Final = 1024
LARGEST_AT_ONCE: Final = 8
"""The limit of all bodies together, in bodies of the largest size."""
_SMALL_BYTES: Final = 64 * 1024


class BodyTooLargeError(ClientError):
    """The body is larger than this gateway reads."""

    code = "body_too_large"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than the {limit_bytes} bytes this gateway reads")


class BodyTimeoutError(ClientError):
    """The body did not arrive in time."""

    code = "body_timeout"
    status = 408

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request's body did not arrive in time: expected its next bytes within {timeout_s:g} s, and "
            f"{SLOWEST_BYTES_PER_S} bytes a second on average"
        )


class BodiesTooLargeError(CapacityError):
    """The bodies of all requests together are larger than this gateway holds."""

    code = "bodies_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the requests in progress have bodies of {limit_bytes} bytes together, which is the most this "
            "gateway holds at a time; try again"
        )


class BodyLimit(Middleware):
    """Limits the size and the duration of request bodies.

    A body is held until its request is answered; all bodies together may be `LARGEST_AT_ONCE` times as large
    as one. A client may pause for `timeout_s`. On average it must send `SLOWEST_BYTES_PER_S`, so that it
    cannot keep a body open by sending a byte before each pause ends.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(app)
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        self._held_bytes = 0

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if (_content_length(scope) or 0) > self._limit_bytes:
            refusal = errors.of_exception(BodyTooLargeError(self._limit_bytes))
            return ErrorResponse(refusal)(scope, receive, send)
        received_bytes = 0
        is_whole = False
        begun_s = self._clock()

        async def receive_limited() -> Message:
            nonlocal received_bytes, is_whole
            if is_whole:
                return await receive()  # the body has ended: this waits for the client to disconnect
            allowed_s = begun_s + self._timeout_s + received_bytes / SLOWEST_BYTES_PER_S - self._clock()
            try:
                async with asyncio.timeout(min(self._timeout_s, allowed_s)):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeoutError(self._timeout_s) from None
            size = len(message.get("body", b""))
            received_bytes += size
            self._held_bytes += size
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            if received_bytes > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            if self._held_bytes > LARGEST_AT_ONCE * self._limit_bytes:
                raise BodiesTooLargeError(LARGEST_AT_ONCE * self._limit_bytes)
            return message

        def release(error: BaseException | None) -> None:
            self._held_bytes -= received_bytes

        exchange.on_end(release)
        return self._next(exchange, scope, receive_limited, send)


class UnreadBody(Middleware):
    """Closes the connection after an answer that was given before the request's body was read.

    The rest of the body would have to be read and discarded before the next request. That is done for
    `_SMALL_BYTES` at most; otherwise the client is sent `connection: close`, and `gateway.http.connection`
    closes.
    """

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        length = _content_length(scope)
        is_whole = length is not None and length <= _SMALL_BYTES

        async def receive_watched() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        def close_if_unread(message: Message) -> None:
            if not is_whole:
                MutableHeaders(scope=message)["connection"] = "close"

        exchange.on_head(close_if_unread)
        return self._next(exchange, scope, receive_watched, send)


def _content_length(scope: Scope) -> int | None:
    """The length of the body by its head; None if the head does not say."""
    if header(scope["headers"], b"transfer-encoding") is not None:
        return None
    length = header(scope["headers"], b"content-length")
    if length is None:
        return 0
    return int(length) if length.isdecimal() else None
