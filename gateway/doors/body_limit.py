"""How large a request's body may be, and how late; and what becomes of one that was not read."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from shared.errors import ClientError

SLOWEST_BYTES_PER_S: Final = 1024
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


class BodyLimit:
    """ASGI middleware: a body is refused by its Content-Length, or when it has become too long, or too late.

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
            received_bytes += len(message.get("body", b""))
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            if received_bytes > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            return message

        await self._app(scope, receive_limited, send)


class UnreadBody:
    """ASGI middleware: an answer before the request was read whole ends the connection.

    What a client has still to send would have to be read, and thrown away, before the next request can be.
    A little is; for more the connection is closed (`gateway.connection` says how), and the client told so.
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
