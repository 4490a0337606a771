"""Middleware that admits or refuses a request: not while the gateway drains, nor above `max_in_flight`.

It decides before the body is read, so that a refused request costs nothing. An admitted request holds its
place until its answer has ended. That bounds the answers in progress, and the memory they need.
"""

from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import ErrorResponse
from gateway.middleware.exchange import Exchange, Middleware
from gateway.requests.service import DrainingError, Gateway
from shared.errors import CapacityError

_ANSWERED_METHOD: Final = "POST"


class TooManyRequestsError(CapacityError):
    """The gateway gives its maximum number of answers at a time."""

    code = "too_many_requests"
    status = 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"this gateway gives {limit} answers at a time, and all are in use; try again later")


class Admission(Middleware):
    """Refuses requests that cannot be answered now, and closes connections while the gateway drains."""

    def __init__(self, app: ASGIApp, *, gateway: Gateway, limit: int) -> None:
        super().__init__(app)
        self._gateway = gateway
        self._limit = limit
        self._admitted = 0

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        exchange.on_head(self._close_if_draining)
        if scope["method"] == _ANSWERED_METHOD:
            if self._gateway.is_draining:
                return ErrorResponse(errors.of_exception(DrainingError()))(scope, receive, send)
            if self._admitted >= self._limit:
                refusal = errors.of_exception(TooManyRequestsError(self._limit))
                return ErrorResponse(refusal)(scope, receive, send)
            self._admitted += 1
            exchange.on_end(self._release)
        return self._next(exchange, scope, receive, send)

    def _close_if_draining(self, message: Message) -> None:
        if self._gateway.is_draining:
            MutableHeaders(scope=message)["connection"] = "close"

    def _release(self, error: BaseException | None) -> None:
        self._admitted -= 1
