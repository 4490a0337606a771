"""The base of all ASGI middleware here: an HTTP exchange with hooks at its response's head and end.

Most middleware only acts when a response begins, and again when the application has returned. A `send`
wrapper and a coroutine for each of them would add two frames each to every chunk of a stream. So the
outermost middleware opens one `Exchange` for the request. It has the only `send` wrapper and the only
coroutine; the other middleware registers hooks with it, and returns the inner application's awaitable.

Hooks run as nested wrappers would: those at the head from the innermost middleware to the outermost, and so
do those at the end (an `ExitStack`).
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HeadHook: TypeAlias = Callable[[Message], None]
EndHook: TypeAlias = Callable[[BaseException | None], bool | None]
_KEY: Final = "dalsegno.exchange"


class Exchange:
    """One request and its response.

    Attributes:
        at_end: entered before the application is called, and left when it has returned or raised.
        status: the status of the response, once the application has begun it.
        sent_status: the same, once the server has accepted it.
        sent_bytes: body bytes that the server has accepted.
        is_complete: the server has accepted the last byte.
    """

    __slots__ = ("_head_hooks", "_send", "at_end", "is_complete", "sent_bytes", "sent_status", "status")

    def __init__(self, send: Send) -> None:
        self.at_end = ExitStack()
        self.status: int | None = None
        self.sent_status: int | None = None
        self.sent_bytes = 0
        self.is_complete = False
        self._head_hooks: list[HeadHook] = []
        self._send = send

    def on_head(self, hook: HeadHook) -> None:
        """Call `hook` with `http.response.start` before it is sent; the hook may change its headers."""
        self._head_hooks.append(hook)

    def on_end(self, hook: EndHook) -> None:
        """Call `hook` with the exception that left the application, if any; True suppresses it."""
        self.at_end.push(lambda kind, error, trace: hook(error))

    async def send(self, message: Message) -> None:
        """Pass a message on to the server."""
        if message["type"] == "http.response.body":
            await self._send(message)
            self.sent_bytes += len(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
            return
        is_head = message["type"] == "http.response.start"
        if is_head:
            for hook in reversed(self._head_hooks):
                hook(message)
            self.status = message["status"]
        await self._send(message)
        if is_head:
            self.sent_status = self.status


class Middleware(ABC):
    """ASGI middleware that sees HTTP requests alone, each with its exchange."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        exchange = scope.get(_KEY)
        if exchange is None:
            return self._open(scope, receive, send)
        return self._handle(exchange, scope, receive, send)

    @abstractmethod
    def _handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Register hooks, and return what `self._app`, or a refusal, returns."""

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the exchange: this is the outermost middleware."""
        exchange = scope[_KEY] = Exchange(send)
        with exchange.at_end:
            await self._handle(exchange, scope, receive, exchange.send)
