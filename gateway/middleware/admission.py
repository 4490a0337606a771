"""Whether a request is taken now: not when this gateway ends, and not when it has too many already.

Decided before the body is read, so that what cannot be taken costs nothing. What is taken holds its place
until its answer is given, so that the answers under way, and the memory they need, are bounded.
"""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.requests.service import DrainingError, Gateway
from shared.errors import CapacityError

_ASKING: Final = "POST"


class TooManyError(CapacityError):
    """As many answers are given as this gateway gives at a time."""

    code = "too_many_requests"
    status = 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} answers are being given, and no more at a time; try again later")


class Admission:
    """ASGI middleware: refuses what cannot be taken now, and lets go of connections when the end comes."""

    def __init__(self, app: ASGIApp, *, gateway: Gateway, limit: int) -> None:
        self._app = app
        self._gateway = gateway
        self._limit = limit
        self._taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._gateway.is_draining:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if scope["method"] != _ASKING:
            await self._app(scope, receive, send_closing)
            return
        if self._gateway.is_draining:
            await errors.send(send_closing, errors.of_exception(DrainingError()))
            return
        if self._taken >= self._limit:
            await errors.send(send_closing, errors.of_exception(TooManyError(self._limit)))
            return
        self._taken += 1
        try:
            await self._app(scope, receive, send_closing)
        finally:
            self._taken -= 1
