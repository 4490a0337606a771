"""How large a request's body may be, and how late; and what becomes of one that was not read."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from shared.errors import CapacityError, ClientError

SLOWEST_BYTES_PER_S: Final = 1024
LARGEST_AT_ONCE: Final = 8
"""So many bodies of the largest size may be held at a time, or more that are smaller."""
_LITTLE_BYTES: Final = 64 * 1024


class BodyTooLargeError(ClientError):
    """The body is larger than this gateway reads."""

    code = "body_too_large"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than the {limit_bytes} bytes this gateway reads")


class BodyTimeoutError(ClientError):
    """The body did not come."""

    code = "body_timeout"
    status = 408

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request's body did not come: its next piece is awaited for {timeout_s:g} s, and "
            f"{SLOWEST_BYTES_PER_S} bytes a second of it on the whole"
        )


class BodiesTooLargeError(CapacityError):
    """The bodies of all requests together are more than this gateway holds."""

    code = "bodies_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the requests under way have bodies of {limit_bytes} bytes together, which is what this gateway "
            "holds at a time; try again"
        )


class BodyLimit:
    """ASGI middleware: a body is refused by its Content-Length, or when it has become too long, or too late.

    All together may be `LARGEST_AT_ONCE` times as long: a body is held until its request is answered.
    A client may pause for `timeout_s`. It may not send a byte before each pause ends, for ever: on the whole
    a body comes at `SLOWEST_BYTES_PER_S` at least.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limit_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (_announced(scope) or 0) > self._limit_bytes:
            await errors.send(send, errors.of_exception(BodyTooLargeError(self._limit_bytes)))
            return
        received_bytes = 0
        is_whole = False
        begun_s = self._clock()

        async def receive_limited() -> Message:
            nonlocal received_bytes, is_whole
            if is_whole:
                return await receive()  # nothing more is sent: this waits for the client to leave
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

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._held_bytes -= received_bytes


class UnreadBody:
    """ASGI middleware: an answer before the request was read whole ends the connection.

    What a client has still to send would have to be read, and thrown away, before the next request can be.
    A little is; for more the connection is closed (`gateway.http.connection` says how), and the client told
    so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _announced(scope)
        is_whole = announced is not None and announced <= _LITTLE_BYTES

        async def receive_watched() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive_watched, send_closing)


def _announced(scope: Scope) -> int | None:
    """How many bytes the body has, as far as its head tells."""
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return None
    length = headers.get("content-length", "0")
    return int(length) if length.isdecimal() else None
