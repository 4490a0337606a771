"""Middleware that makes a server span of each admitted POST, from its head to the last byte of its answer.

A valid `traceparent` header makes the span a child of the client's, and decides whether it is sampled;
otherwise the span begins a new trace. The span's own `traceparent` then replaces the client's header. So it
goes into the request's events, and the spans of conductor and workers become children of it. With tracing
off, the client's header is passed on unchanged.
"""

from collections.abc import Awaitable
from types import TracebackType
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from gateway.middleware.exchange import Exchange, Middleware
from gateway.middleware.http_metrics import route_of
from shared.telemetry import tracing

TRACEPARENT: Final = "traceparent"


class ServerSpan(Middleware):
    """Makes the span; innermost, so that refused requests make none."""

    def _handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if tracing.is_on() and scope["method"] == "POST":
            _open_span(exchange, scope)
        return self._app(scope, receive, send)


def _open_span(exchange: Exchange, scope: Scope) -> None:
    parent = Headers(scope=scope).get(TRACEPARENT)
    span = tracing.serve("POST", parent, {"http.request.method": scope["method"]})
    assert span.traceparent is not None
    scope["headers"] = list(scope["headers"])
    MutableHeaders(scope=scope)[TRACEPARENT] = span.traceparent

    def describe(message: Message) -> None:
        span.set({"http.response.status_code": message["status"]})
        request_id = Headers(raw=message["headers"]).get("x-request-id")
        if request_id is not None:
            span.set({"dalsegno.request_id": request_id})
        if message["status"] >= 500:
            span.fail(str(message["status"]))

    def name(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            route = route_of(scope)
            span.name(f"POST {route}")
            span.set({"http.route": route})

    exchange.on_head(describe)
    exchange.at_end.callback(tracing.restore, tracing.make_current(span))
    exchange.at_end.enter_context(span)
    exchange.at_end.push(name)
