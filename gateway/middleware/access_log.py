"""One line for the operator per HTTP request: what was asked, by whom, and how it ended.

    POST /v1/chat/completions 200, 1284 bytes in 215.3 ms, to 10.0.0.7, key alice, request chatcmpl-9f1b...

Never the query, a header or a body: they may hold keys and prompts. Who looks after the health of this
process asks every few seconds, so those lines are for `debug`.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.middleware import request_id
from gateway.middleware.paths import is_watching

_LOGGER: Final = logging.getLogger(__name__)
_PATH_CHARS: Final = 200


class AccessLog:
    """ASGI middleware: says each request when it has ended, and ends what a bug has left without an end."""

    def __init__(
        self, app: ASGIApp, *, says_requests: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._says_requests = says_requests
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = self._clock()
        exchange = _Exchange(send)
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:
            if not exchange.is_complete:
                raise
            # A bug that was answered with a 500: `gateway.errors` has said it already, with its traceback.
        finally:
            if self._says_requests:
                _say(scope, exchange, self._clock() - begun_s)


class _Exchange:
    """What was sent so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.request_id: str | None = None
        self.sent_bytes = 0
        self.is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.request_id = Headers(raw=message["headers"]).get(request_id.HEADER)  # before it is renamed
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)


def _say(scope: Scope, exchange: _Exchange, took_s: float) -> None:
    level = logging.DEBUG if is_watching(scope["path"]) else logging.INFO
    if not _LOGGER.isEnabledFor(level):
        return
    facts: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:_PATH_CHARS],
        "status": exchange.status,
        "duration_ms": round(took_s * 1e3, 1),
        "bytes": exchange.sent_bytes,
        "client": scope["client"][0] if scope.get("client") else None,
        "key": scope.get("state", {}).get("key"),
        "request_id": exchange.request_id,
        "complete": exchange.is_complete,
    }
    ended = "" if exchange.is_complete else ", left before its end"
    words = (
        f"{facts['method']} {facts['path']} {facts['status'] or '-'}, {facts['bytes']} bytes in "
        f"{facts['duration_ms']} ms, to {facts['client']}{ended}"
    )
    if facts["key"] is not None:
        words += f", key {facts['key']}"
    if facts["request_id"] is not None:
        words += f", request {facts['request_id']}"
    _LOGGER.log(level, "%s", words, extra=facts)
