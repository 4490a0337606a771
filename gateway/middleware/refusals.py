"""Middleware that records each request that is answered with an error before any of it is on the log.

The record has no header, no query and no body: only what the response says, the route, the name of the key,
and the request's names (`gateway.requests.refusals`).
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.client_key import key_name
from gateway.errors import CHOSEN_ID, REFUSAL, HttpError
from gateway.middleware import request_id
from gateway.middleware.api_keys import secret_of
from gateway.middleware.exchange import Exchange, Middleware, header
from gateway.middleware.http_metrics import OTHER, method_of, route_of
from gateway.requests.refusals import sample
from shared.errors import DalSegnoError
from shared.events import Refusal

AddRefusal = Callable[[Refusal], None]


class RefusalRecord(Middleware):
    """Adds each refused request to `add`, once its exchange has ended.

    `known_paths` are those of the routes. An unknown path is a client's text, and is not recorded.
    """

    def __init__(self, app: ASGIApp, *, add: AddRefusal, known_paths: frozenset[str]) -> None:
        super().__init__(app)
        self._add = add
        self._known_paths = known_paths

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        own_id: str | None = None

        def note_id(message: Message) -> None:  # before `CorrelationId` replaces it
            nonlocal own_id
            own_id = header(message["headers"], request_id.RAW_HEADER)

        def record(error: BaseException | None) -> None:
            refusal: HttpError | None = scope.get("state", {}).get(REFUSAL)
            if refusal is not None:
                self._add(self._refusal(scope, refusal, own_id))

        exchange.on_head(note_id)
        exchange.on_end(record)
        return self._next(exchange, scope, receive, send)

    def _refusal(self, scope: Scope, error: HttpError, own_id: str | None) -> Refusal:
        state = scope.get("state", {})
        return sample(
            error.code,
            error.status,
            error.message,
            time_ns=time.time_ns(),
            param=error.param,
            tenant=key_name(scope),
            route=f"{method_of(scope)} {self._route(scope)}",
            request_id=state.get(CHOSEN_ID) or own_id,
            correlation=state.get(request_id.NAME),
            secret=secret_of(Headers(scope=scope)),
        )

    def _route(self, scope: Scope) -> str:
        """The path's template, or the path of a request that was refused before the router saw it."""
        route, path = route_of(scope), str(scope["path"])
        return path if route == OTHER and path in self._known_paths else route


def unread(add: AddRefusal) -> Callable[[DalSegnoError, str], None]:
    """Return a function that records a request that was refused before it could be read.

    Its arguments are the error, and the name of the request in the response.
    """
    return partial(_add_unread, add)


def _add_unread(add: AddRefusal, error: DalSegnoError, name: str) -> None:
    add(
        sample(
            error.failure_code,
            error.failure_status,
            error.message,
            time_ns=time.time_ns(),
            correlation=name,
        )
    )
