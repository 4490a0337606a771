"""Middleware that makes a server span of each admitted POST, from its head to the last byte of its answer.

A valid `traceparent` header makes the span a child of the client's, and decides whether it is sampled;
otherwise the span begins a new trace. The span's own `traceparent` then replaces the client's header. So it
goes into the request's events, and the spans of conductor and workers become children of it. With tracing
off, the client's header is passed on unchanged.
"""

from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from gateway.middleware.exchange import Exchange, Middleware
from gateway.middleware.http_metrics import route_of
from shared.telemetry import tracing

TRACEPARENT: Final = "traceparent"


class ServerSpan(Middleware):
    """Makes the span; innermost, so that refused requests make none."""

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if tracing.is_on() and scope["method"] == "POST":
            _open_span(exchange, scope)
        return self._next(exchange, scope, receive, send)


def _open_span(exchange: Exchange, scope: Scope) -> None:
    parent = Headers(scope=scope).get(TRACEPARENT)
    span = tracing.start_server_span("POST", parent, {"http.request.method": scope["method"]})
    scope["headers"] = list(scope["headers"])
    MutableHeaders(scope=scope)[TRACEPARENT] = tracing.traceparent_of(span) or ""

    def describe(message: Message) -> None:
        span.set_attributes({"http.response.status_code": message["status"]})
        request_id = Headers(raw=message["headers"]).get("x-request-id")
        if request_id is not None:
            span.set_attributes({"dalsegno.request_id": request_id})
        if message["status"] >= 500:
            tracing.fail(span, str(message["status"]))

    def name(error: BaseException | None) -> None:
        if error is None:
            route = route_of(scope)
            span.update_name(f"POST {route}")
            span.set_attributes({"http.route": route})

    exchange.on_head(describe)
    exchange.enter(tracing.current(span))
    exchange.enter(tracing.ending(span))
    exchange.on_end(name)
