"""The trace of an answer begins here: one server span per POST that was let in, to its last byte.

It is of the client's trace, if there is a `traceparent`, and sampled or not as that says; else the first of a
new one. What is behind sees the span's own `traceparent` in place of the client's: so that is what goes into
the request's events, and what conductor and workers make their spans of. Without tracing nothing is touched,
and the client's own goes there.
"""

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.middleware.http_metrics import route_of
from shared.telemetry import tracing

TRACEPARENT: Final = "traceparent"


class Traced:
    """ASGI middleware: innermost, so that who is refused makes no spans."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not tracing.is_on() or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = tracing.serve(
            "POST", Headers(scope=scope).get(TRACEPARENT), {"http.request.method": scope["method"]}
        )
        assert span.traceparent is not None
        scope["headers"] = list(scope["headers"])
        MutableHeaders(scope=scope)[TRACEPARENT] = span.traceparent

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                _begun(span, message)
            await send(message)

        token = tracing.make_current(span)
        try:
            with span:
                await self._app(scope, receive, send_seen)
                route = route_of(scope)
                span.name(f"POST {route}")
                span.set({"http.route": route})
        finally:
            tracing.restore(token)


def _begun(span: tracing.Span, message: Message) -> None:
    span.set({"http.response.status_code": message["status"]})
    request_id = Headers(raw=message["headers"]).get("x-request-id")
    if request_id is not None:
        span.set({"dalsegno.request_id": request_id})
    if message["status"] >= 500:
        span.fail(str(message["status"]))
