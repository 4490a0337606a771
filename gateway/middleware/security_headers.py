"""Middleware that adds security headers: a browser may do nothing with a response but read it.

No response is a page. So a browser must not run scripts, frames or styles from it, guess its type, or send a
referrer. `Strict-Transport-Security` is left to the proxy that terminates TLS.
"""

from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.middleware.exchange import Exchange, Middleware

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class SecurityHeaders(Middleware):
    """Adds the headers that a response does not set itself.

    `cross_origin` is true if pages of other origins may read responses (CORS): a browser would otherwise
    obey the resource policy first.
    """

    def __init__(self, app: ASGIApp, *, cross_origin: bool = False) -> None:
        super().__init__(app)
        policy = {"cross-origin-resource-policy": "cross-origin"} if cross_origin else {}
        self._headers = {**HEADERS, **policy, "cache-control": "no-store"}

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        exchange.on_head(self._add)
        return self._next(exchange, scope, receive, send)

    def _add(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        for name, value in self._headers.items():
            headers.setdefault(name, value)
