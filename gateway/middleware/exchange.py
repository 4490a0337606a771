"""The base of all ASGI middleware here: an HTTP exchange with hooks at its response's head and end.

Most middleware only acts when a response begins, and again when the application has returned. A `send`
wrapper and a coroutine for each of them would add two frames each to every chunk of a stream. So the
outermost middleware opens one `Exchange` for the request. It has the only `send` wrapper and the only
coroutine; the other middleware registers hooks with it, and returns the inner application's awaitable.

Hooks run as nested wrappers would: from the innermost middleware to the outermost. Each hook at the end runs,
whatever the others raise, and may suppress or replace the exception that the outer ones get.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]
HeadHook: TypeAlias = Callable[[Message], None]
EndHook: TypeAlias = Callable[[BaseException | None], bool | None]
_KEY: Final = "dalsegno.exchange"


class Exchange:
    """One request and its response.

    Attributes:
        status: the status of the response, once the application has started it.
        sent_status: the same, once the server has accepted it.
        sent_bytes: body bytes that the server has accepted.
        is_complete: the server has accepted the last byte.
    """

    __slots__ = ("_end_hooks", "_head_hooks", "_send", "is_complete", "sent_bytes", "sent_status", "status")

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self.sent_status: int | None = None
        self.sent_bytes = 0
        self.is_complete = False
        self._head_hooks: list[HeadHook] = []
        self._end_hooks: list[EndHook] = []
        self._send = send

    def on_head(self, hook: HeadHook) -> None:
        """Call `hook` with `http.response.start` before it is sent; the hook may change its headers."""
        self._head_hooks.append(hook)

    def on_end(self, hook: EndHook) -> None:
        """Call `hook` with the exception that left the application, if any; True suppresses it."""
        self._end_hooks.append(hook)

    def enter(self, context: AbstractContextManager[object]) -> None:
        """Enter a context manager, and exit it at the end."""
        context.__enter__()

        def leave(error: BaseException | None) -> bool | None:
            if error is None:
                return context.__exit__(None, None, None)
            return context.__exit__(type(error), error, error.__traceback__)

        self.on_end(leave)

    def end(self, error: BaseException | None) -> BaseException | None:
        """Call the hooks at the end; return the exception that is left."""
        for hook in reversed(self._end_hooks):
            try:
                if hook(error):
                    error = None
            except BaseException as raised:  # noqa: BLE001 - it is returned
                error = raised
        return error

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


_Handler: TypeAlias = Callable[[Exchange, Scope, Receive, Send], Awaitable[None]]


class Middleware(ABC):
    """ASGI middleware that sees HTTP requests alone, each with its exchange."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._next: _Handler = app.handle if isinstance(app, Middleware) else _without_exchange(app)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        exchange = scope.get(_KEY)
        if exchange is None:
            return self._open(scope, receive, send)
        return self.handle(exchange, scope, receive, send)  # called by other middleware, as CORS

    @abstractmethod
    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Register hooks, and return what `self._next`, or a refusal, returns."""

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the exchange: this is the outermost middleware."""
        exchange = scope[_KEY] = Exchange(send)
        try:
            await self.handle(exchange, scope, receive, exchange.send)
        except BaseException as error:
            left = exchange.end(error)
            if left is error:
                raise
        else:
            left = exchange.end(None)
        if left is not None:
            raise left


def _without_exchange(app: ASGIApp) -> _Handler:
    def handle(exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return app(scope, receive, send)

    return handle


def header(headers: RawHeaders, name: bytes) -> str | None:
    """The first header of this lower-case name; several times faster than a `starlette.Headers`."""
    for one, value in headers:
        if one == name:
            return value.decode("latin-1")
    return None
