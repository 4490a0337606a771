"""Middleware for request bodies: their size, the time they may take, and bodies that were not read.

A body is refused by its Content-Length, or once it is too long or too late. An answer that is given before
the body was read closes the connection.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
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


class _Budget:
    """The size limit of one body of a kind, and the bytes of all of them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.all_bytes = LARGEST_AT_ONCE * limit_bytes
        self.held_bytes = 0


class BodyLimit(Middleware):
    """Limits the size and the duration of request bodies.

    A body is held until its request is answered; all bodies together may be `LARGEST_AT_ONCE` times as large
    as one. A client may pause for `timeout_s`. On average it must send `SLOWEST_BYTES_PER_S`, so that it
    cannot keep a body open by sending a byte before each pause ends.

    Uploads go to disk, and have limits of their own, `upload_bytes` each: forms that are sent to one of
    `upload_paths`, and bytes that are PUT below one of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit_bytes: int,
        timeout_s: float,
        upload_bytes: int = 0,
        upload_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(app)
        self._in_memory = _Budget(limit_bytes)
        self._on_disk = _Budget(upload_bytes)
        self._upload_paths = upload_paths
        self._timeout_s = timeout_s
        self._clock = clock

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        budget = self._on_disk if self._is_upload(scope) else self._in_memory
        if (_content_length(scope) or 0) > budget.limit_bytes:
            refusal = errors.of_exception(BodyTooLargeError(budget.limit_bytes))
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
            budget.held_bytes += size
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            if received_bytes > budget.limit_bytes:
                raise BodyTooLargeError(budget.limit_bytes)
            if budget.held_bytes > budget.all_bytes:
                raise BodiesTooLargeError(budget.all_bytes)
            return message

        def release(error: BaseException | None) -> None:
            budget.held_bytes -= received_bytes

        exchange.on_end(release)
        return self._next(exchange, scope, receive_limited, send)

    def _is_upload(self, scope: Scope) -> bool:
        if not self._upload_paths:
            return False
        path = scope["path"]
        if scope["method"] == "PUT":
            return path.rpartition("/")[0] in self._upload_paths
        kind = header(scope["headers"], b"content-type") or ""
        return path in self._upload_paths and kind.lower().lstrip().startswith("multipart/form-data")


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
