"""Middleware that counts HTTP responses by method, route and status, refusals included."""

from collections.abc import Awaitable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.meters.answers import Meter
from gateway.middleware.exchange import Exchange, Middleware

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"
"""The label of unknown methods and paths: clients must not be able to create series."""


class HttpMetrics(Middleware):
    """Counts each response. One that a bug prevented counts as a 500."""

    def __init__(self, app: ASGIApp, *, meter: Meter) -> None:
        super().__init__(app)
        self._meter = meter

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        def count(error: BaseException | None) -> None:
            status = exchange.status or (500 if isinstance(error, Exception) else None)
            if status is not None:  # None: the client left before the response began
                self._meter.http[method_of(scope), route_of(scope), status] += 1

        exchange.on_end(count)
        return self._next(exchange, scope, receive, send)


def method_of(scope: Scope) -> str:
    """The request's method; `other` for an unknown one."""
    return scope["method"] if scope["method"] in _METHODS else OTHER


def route_of(scope: Scope) -> str:
    """The path's template, as the router found it; `other` for an unknown path."""
    template = getattr(scope.get("route"), "path", None)
    return template if isinstance(template, str) else OTHER
