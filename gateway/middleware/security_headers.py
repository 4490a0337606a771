"""Headers that tell a browser to do no more with an answer than read it.

Nothing here is a page. So: no script, frame or style of it is ever run, its type is not guessed, and nobody
learns from where it was asked. `Strict-Transport-Security` is for whoever speaks TLS, before us.
"""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class SecurityHeaders:
    """ASGI middleware: every answer has them, unless it says otherwise itself.

    `cross_origin` is whether pages of other origins may read answers (see CORS): a browser would obey the
    resource policy first.
    """

    def __init__(self, app: ASGIApp, *, cross_origin: bool = False) -> None:
        self._app = app
        self._headers = HEADERS | ({"cross-origin-resource-policy": "cross-origin"} if cross_origin else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)
