"""The middleware stack of the gateway's application, from the outermost to the innermost; the order matters.

    HttpMetrics       counts every response
    CorrelationId     adds a name to every response, errors included
    UnreadBody        closes the connection after an answer before the end of the body
    AccessLog         logs one line for each request
    RefusalRecord     records refused requests for the log
    SecurityHeaders   on errors too
    OriginCheck       refuses pages of other origins, and requests for another host
    CORS              a page may read errors; a preflight needs no key
    ApiKeys           refuses a request without reading its body
    RateLimit         counts by key, so it comes after the keys
    Admission         refuses a request without reading its body
    BodyLimit         limits the size and the duration of a body
    ServerSpan        makes a span of an admitted request

Middleware that is not configured is left out. All of it is plain ASGI, so that chunks are passed on at once
and a client's disconnect is seen (Starlette's `BaseHTTPMiddleware` would prevent both). A chunk passes one
frame of it, whatever its number: `gateway.middleware.exchange`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import fastapi
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.secrets import ApiKey
from gateway.middleware import rate_limit, request_id
from gateway.middleware.access_log import AccessLog
from gateway.middleware.admission import Admission
from gateway.middleware.api_keys import ApiKeys
from gateway.middleware.body_limit import BodyLimit, UnreadBody
from gateway.middleware.http_metrics import HttpMetrics
from gateway.middleware.origins import OriginCheck
from gateway.middleware.rate_limit import RateLimit
from gateway.middleware.refusals import RefusalRecord
from gateway.middleware.request_id import CorrelationId
from gateway.middleware.security_headers import SecurityHeaders
from gateway.middleware.tracing import ServerSpan
from gateway.requests.response import DURABILITY
from gateway.requests.service import Gateway

_METHODS: Final = ("GET", "POST", "PUT", "DELETE")
_EXPOSED_HEADERS: Final = (
    request_id.HEADER, request_id.OWN_HEADER, DURABILITY, "retry-after", *rate_limit.HEADERS,
)  # fmt: skip
"""Response headers that a page of another origin may read."""
_PREFLIGHT_S: Final = 600
UPLOAD_PATHS: Final = (
    "/v1/files", "/generate", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits",
    "/v1/images/variations", "/v1/videos",
)  # fmt: skip
"""The routes that take files; those after the first one only if the model takes media."""


class GatewayApp(fastapi.FastAPI):
    """The FastAPI application, inside the stack.

    The stack is outside of Starlette's own error handler: middleware added by `add_middleware` would be
    inside of it, and a 500 would lack its headers.
    """

    gateway: Gateway
    keys: Sequence[ApiKey] = ()
    logs_requests: bool = True
    takes_media: bool = False
    known_paths: frozenset[str] = frozenset()

    @cached_property
    def _inner(self) -> ASGIApp:
        return super().build_middleware_stack()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that this process makes itself, without the middleware."""
        scope["app"] = self
        await self._inner(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        return with_middleware(
            self._inner,
            self.gateway,
            self.keys,
            logs_requests=self.logs_requests,
            upload_paths=UPLOAD_PATHS if self.takes_media else UPLOAD_PATHS[:1],
            known_paths=self.known_paths,
        )


def with_middleware(
    app: ASGIApp,
    gateway: Gateway,
    keys: Sequence[ApiKey],
    *,
    logs_requests: bool,
    upload_paths: Sequence[str],
    known_paths: frozenset[str],
) -> ASGIApp:
    """`app` inside the middleware that the gateway's settings ask for."""
    settings = gateway.settings
    app = ServerSpan(app)
    app = BodyLimit(
        app,
        limit_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        upload_bytes=gateway.media_settings.max_request_bytes,
        upload_paths=upload_paths,
    )
    app = Admission(app, gateway=gateway, limit=settings.max_in_flight)
    if settings.requests_per_minute:
        app = RateLimit(app, per_minute=settings.requests_per_minute)
    if keys:
        app = ApiKeys(app, keys=keys, has_page=settings.page)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
            max_age=_PREFLIGHT_S,
        )
    app = OriginCheck(app, settings=settings)
    if settings.security_headers:
        app = SecurityHeaders(app, cross_origin=bool(settings.cors_origins))
    app = RefusalRecord(app, add=gateway.refusals.add, known_paths=known_paths)
    app = AccessLog(app, logs_requests=logs_requests)
    app = UnreadBody(app)
    app = CorrelationId(app)
    return HttpMetrics(app, meter=gateway.meter)
