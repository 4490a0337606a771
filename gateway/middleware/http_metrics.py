"""Counts HTTP responses by method, route and status: outermost, so that refusals are counted too."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.meters.answers import Meter

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"
"""A method, or a path, that is none of ours: whoever sends those is not to make series of them."""


class HttpMeter:
    """ASGI middleware. A response that never began, because of a bug, counts as a 500."""

    def __init__(self, app: ASGIApp, *, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            status = status or 500
            raise
        finally:
            if status is not None:  # else the client left before
                method = scope["method"] if scope["method"] in _METHODS else OTHER
                self._meter.http[method, route_of(scope), status] += 1


def route_of(scope: Scope) -> str:
    """The template of the path, once the router has seen it; `other` if it has not, or has none."""
    template = getattr(scope.get("route"), "path", None)
    return template if isinstance(template, str) else OTHER
