"""Middleware that logs one line for each HTTP request: method, path, status, size, duration, client, key, id.

    POST /v1/chat/completions 200, 1284 bytes in 215.3 ms, to 10.0.0.7, key alice, request chatcmpl-9f1b...
    POST /v1/embeddings 400, 131 bytes in 0.4 ms, to 10.0.0.7, error invalid_json, request req-4be0...

The request is named as in the response's `x-request-id`: by its id on the log, or, if it has none, by the
client's or a generated name.
The query, headers and body are never logged: they may hold keys and prompts. Monitoring asks for health and
metrics every few seconds; those lines have the level `debug`.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.client_key import KEY_NAME
from gateway.errors import ERROR_CODE
from gateway.middleware import request_id
from gateway.middleware.exchange import Exchange, Middleware, header
from gateway.middleware.paths import is_monitoring
from shared.errors import DalSegnoError

_LOGGER: Final = logging.getLogger(__name__)
_PATH_CHARS: Final = 200


class AccessLog(Middleware):
    """Logs each request when it has ended. Ends the exception of a bug that was answered with a 500."""

    def __init__(
        self, app: ASGIApp, *, logs_requests: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(app)
        self._logs_requests = logs_requests
        self._clock = clock

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        begun_s = self._clock()
        own_id: str | None = None

        def note_id(message: Message) -> None:  # before `CorrelationId` replaces it
            nonlocal own_id
            own_id = header(message["headers"], request_id.RAW_HEADER)

        def end(error: BaseException | None) -> bool:
            if self._logs_requests:
                _log(scope, exchange, own_id, self._clock() - begun_s)
            # `gateway.errors` has logged a bug that was answered with a 500, with its traceback.
            return exchange.is_complete and isinstance(error, Exception)

        exchange.on_head(note_id)
        exchange.on_end(end)
        return self._next(exchange, scope, receive, send)


def _log(scope: Scope, exchange: Exchange, own_id: str | None, took_s: float) -> None:
    level = logging.DEBUG if is_monitoring(scope["path"]) else logging.INFO
    if not _LOGGER.isEnabledFor(level):
        return
    state = scope.get("state", {})
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:_PATH_CHARS],
        "status": exchange.sent_status,
        "duration_ms": round(took_s * 1e3, 1),
        "bytes": 0 if scope["method"] == "HEAD" else exchange.sent_bytes,
        "client": scope["client"][0] if scope.get("client") else None,
        "key": state.get(KEY_NAME),
        "error": state.get(ERROR_CODE),
        "request_id": own_id or state.get(request_id.NAME),
        "complete": exchange.is_complete,
    }
    ended = "" if exchange.is_complete else ", left before its end"
    line = (
        f"{fields['method']} {fields['path']} {fields['status'] or '-'}, {fields['bytes']} bytes in "
        f"{fields['duration_ms']} ms, to {fields['client']}{ended}"
    )
    if fields["key"] is not None:
        line += f", key {fields['key']}"
    if fields["error"] is not None:
        line += f", error {fields['error']}"
    if fields["request_id"] is not None:
        line += f", request {fields['request_id']}"
    _LOGGER.log(level, "%s", line, extra=fields)


def log_refusal(error: DalSegnoError, name: str, client: tuple[str, int] | None, sent_bytes: int) -> None:
    """Log a request that was refused before it could be read, and is `name` in the response."""
    host = client[0] if client else None
    fields = {
        "status": error.failure_status,
        "bytes": sent_bytes,
        "client": host,
        "error": error.failure_code,
        "request_id": name,
    }
    _LOGGER.info(
        "an unread request %d, %d bytes, to %s, error %s, request %s",
        error.failure_status, sent_bytes, host, error.failure_code, name,
        extra=fields,
    )  # fmt: skip
