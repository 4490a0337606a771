"""Middleware for `X-Request-ID`: the client's, or its proxy's, name for a request.

A valid name is returned in the response, added to every log line of the request, and recorded in its event
as `correlation`. Without one, `x-request-id` is the request's own id on the log. A response without a request
on the log gets a generated name, so that a client can always tell an operator which log line to look for.

`x-dalsegno-request-id` always holds the id on the log, if there is one. A client's name is never used as that
id: names repeat (a proxy's retry sends the same one), and a request with an id that exists attaches to the
existing answer.
"""

import re
import secrets
from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from gateway.middleware.exchange import Exchange, Middleware, header
from shared.telemetry import log_fields

HEADER: Final = "x-request-id"
RAW_HEADER: Final = HEADER.encode()
OWN_HEADER: Final = "x-dalsegno-request-id"
NAME: Final = "correlation"
"""The entry of `scope["state"]` with the client's, or our, name for the request."""
_VALID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class CorrelationId(Middleware):
    """Takes the client's name for a request, or generates one, and returns it in the response."""

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        given = valid_name(header(scope["headers"], RAW_HEADER))
        name = given or new_name()
        scope.setdefault("state", {})[NAME] = name

        def add_headers(message: Message) -> None:
            headers = MutableHeaders(scope=message)
            own = headers.get(HEADER)
            if own is not None:
                headers[OWN_HEADER] = own
            headers[HEADER] = given or own or name

        exchange.on_head(add_headers)
        exchange.enter(log_fields.correlated(name, is_clients=given is not None))
        return self._next(exchange, scope, receive, send)


def new_name() -> str:
    """A name for a request that has none."""
    return f"req-{secrets.token_hex(12)}"


def valid_name(name: str | None) -> str | None:
    """The client's name for its request. An invalid one is ignored: it is not worth an error."""
    return name if name is not None and _VALID.fullmatch(name) else None
