"""Middleware that makes a server span of each admitted POST, from its head to the last byte of its answer.

A valid `traceparent` header makes the span a child of the client's, and decides whether it is sampled;
otherwise the span begins a new trace. The span's own `traceparent` then replaces the client's header. So it
goes into the request's events, and the spans of conductor and workers become children of it, or of the span
of the answer in it (`gateway.requests.generation_span`). With tracing off, the client's header is passed on
unchanged.

The attributes are those of OpenTelemetry's conventions for HTTP servers. `error.type` is the code of the
error that answered the request, or else the status. By these conventions, a span with a status from 400 to
499 is no failed one: the client made the mistake. Neither is one whose client left.
"""

from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ERROR_CODE
from gateway.middleware.exchange import Exchange, Middleware
from gateway.middleware.http_metrics import route_of
from shared.telemetry import tracing

TRACEPARENT: Final = "traceparent"
_PATH_CHARS: Final = 200
_CLIENT_ERRORS: Final = 400
_SERVER_ERRORS: Final = 500


class ServerSpan(Middleware):
    """Makes the span; innermost, so that refused requests make none."""

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if tracing.is_on() and scope["method"] == "POST":
            _open_span(exchange, scope)
        return self._next(exchange, scope, receive, send)


def _open_span(exchange: Exchange, scope: Scope) -> None:
    parent = Headers(scope=scope).get(TRACEPARENT)
    span = tracing.start_server_span("POST", parent, _attributes_of(scope))
    scope["headers"] = list(scope["headers"])
    MutableHeaders(scope=scope)[TRACEPARENT] = tracing.traceparent_of(span) or ""

    def describe(message: Message) -> None:
        span.set_attributes({"http.response.status_code": message["status"]})
        request_id = Headers(raw=message["headers"]).get("x-request-id")
        if request_id is not None:
            span.set_attributes({"dalsegno.request_id": request_id})

    def name(error: BaseException | None) -> None:
        code, status = scope.get("state", {}).get(ERROR_CODE), exchange.status or 0
        if _CLIENT_ERRORS <= status < _SERVER_ERRORS:
            span.set_attributes({"error.type": code or str(status)})
        elif code is not None or status >= _SERVER_ERRORS:  # also a stream that failed after its head
            tracing.fail(span, code or str(status))
        if error is None:
            route = route_of(scope)
            span.update_name(f"POST {route}")
            span.set_attributes({"http.route": route})

    exchange.on_head(describe)
    exchange.enter(tracing.current(span))
    exchange.enter(tracing.ending(span))
    exchange.on_end(name)


def _attributes_of(scope: Scope) -> tracing.Attributes:
    """Return what is known before the answer. The query is left out: it may quote the client."""
    server = scope.get("server") or (None, None)
    known: dict[str, str | int | None] = {
        "http.request.method": scope["method"],
        "url.path": tracing.exportable(scope["path"], _PATH_CHARS),
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope.get("http_version"),
        "server.address": server[0],
        "server.port": server[1],
    }
    return {name: value for name, value in known.items() if value is not None}
