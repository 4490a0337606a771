"""`X-Request-ID`: the name under which a client, or the proxy before it, knows a request.

One that can be a name is echoed, said in every log line of the request, and recorded in its event as
`correlation`. Without one, `x-request-id` is the request's own id, the one on the log; and what never became
a request has a name made for it, so that a client can always tell an operator which line to look for.

The id on the log is always in `x-dalsegno-request-id`, where there is one. A client's name is never used as
it: names repeat (a proxy's retry has the same), and whoever asks under an id that is there gets the answer
that is there.
"""

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry import log_fields

HEADER: Final = "x-request-id"
OWN_HEADER: Final = "x-dalsegno-request-id"
_NAME: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Correlation:
    """ASGI middleware: takes the client's name for a request, or makes one; each answer has it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = named(Headers(scope=scope).get(HEADER))
        name = told or f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["correlation"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                own = headers.get(HEADER)
                if own is not None:
                    headers[OWN_HEADER] = own
                headers[HEADER] = told or own or name
            await send(message)

        with log_fields.correlated(name, is_told=told is not None):
            await self._app(scope, receive, send_named)


def named(header: str | None) -> str | None:
    """What a client calls its request, if that can be a name; anything else is not worth an error."""
    return header if header is not None and _NAME.fullmatch(header) else None
