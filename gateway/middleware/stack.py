"""What every request passes on its way to a route, and every answer on its way back; the order matters.

    HttpMeter         every answer counts
    Correlation       each answer says under which name it can be found, also an error
    UnreadBody        and ends its connection, if it comes before the request is whole
    AccessLog         one line each
    SecurityHeaders   on errors too
    CORS              a page may read errors; a preflight needs no key
    ApiKeys           nothing of a body is read for who may not ask
    RateLimit         by key, so behind the keys
    Admission         what cannot be taken now is not read either
    BodyLimit         how much is read, and how long it is waited for
    Traced            a span for what was let in

What is not configured is not there. All are plain ASGI: nothing is held back, and a client that leaves is
noticed (Starlette's `BaseHTTPMiddleware` would break both).
"""

from collections.abc import Sequence
from typing import Final

import fastapi
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from configs.deployment import ApiKey
from gateway.middleware import rate_limit, request_id
from gateway.middleware.access_log import AccessLog
from gateway.middleware.admission import Admission
from gateway.middleware.api_keys import ApiKeys
from gateway.middleware.body_limit import BodyLimit, UnreadBody
from gateway.middleware.http_metrics import HttpMeter
from gateway.middleware.rate_limit import RateLimit
from gateway.middleware.request_id import Correlation
from gateway.middleware.security_headers import SecurityHeaders
from gateway.middleware.tracing import Traced
from gateway.requests.response import DURABILITY
from gateway.requests.service import Gateway

_METHODS: Final = ("GET", "POST", "DELETE")
_READABLE: Final = (
    request_id.HEADER, request_id.OWN_HEADER, DURABILITY, "retry-after", *rate_limit.HEADERS,
)  # fmt: skip
"""The headers of an answer that a page of another origin may read."""
_PREFLIGHT_S: Final = 600


class FrontDoor(fastapi.FastAPI):
    """The application, with all of the above before it.

    Around the whole, because Starlette puts its own last resort around what `add_middleware` adds: a 500
    would come without them.
    """

    gateway: Gateway
    keys: Sequence[ApiKey] = ()
    says_requests: bool = True

    def build_middleware_stack(self) -> ASGIApp:
        return guarded(
            super().build_middleware_stack(), self.gateway, self.keys, says_requests=self.says_requests
        )


def guarded(app: ASGIApp, gateway: Gateway, keys: Sequence[ApiKey], *, says_requests: bool) -> ASGIApp:
    """`app` behind the doors that the gateway's settings ask for."""
    settings = gateway.settings
    app = Traced(app)
    app = BodyLimit(app, limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    app = Admission(app, gateway=gateway, limit=settings.max_in_flight)
    if settings.requests_per_minute:
        app = RateLimit(app, per_minute=settings.requests_per_minute)
    if keys:
        app = ApiKeys(app, keys=keys)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_READABLE,
            max_age=_PREFLIGHT_S,
        )
    if settings.security_headers:
        app = SecurityHeaders(app, cross_origin=bool(settings.cors_origins))
    app = AccessLog(app, says_requests=says_requests)
    app = UnreadBody(app)
    app = Correlation(app)
    return HttpMeter(app, meter=gateway.meter)
