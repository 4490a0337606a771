"""The gateway's composition: routes, middleware, and the process.

The socket is bound first, so `/health/live` answers at once; the log may come later, go, and come back.
Stopped, it finishes its streams (up to `drain_s`), answers new requests with 503, and closes.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import fastapi
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from configs.deployment import ApiKey, DeploymentConfig, api_keys
from gateway import errors, openapi
from gateway.errors import HttpError
from gateway.generate.routes import generate_routes
from gateway.http import server
from gateway.middleware.stack import GatewayApp
from gateway.openai.embeddings import embedding_routes
from gateway.openai.routes import openai_routes
from gateway.operations.about_routes import about_routes
from gateway.operations.health_routes import health_routes
from gateway.operations.metrics_routes import metrics_routes
from gateway.operations.request_routes import request_routes
from gateway.operations.warm_routes import warm_routes
from gateway.requests.service import Gateway, Served
from gateway.speech.routes import speech_routes
from shared.closest_match import closest_match
from shared.errors import DalSegnoError
from shared.log.nats import jetstream
from shared.log.nats.credentials import NOBODY, Credentials
from shared.log.port import DurabilityError, LogRegressedError, LogUnavailableError
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_S: Final = 0.2
_LONGEST_PATH: Final = 200
_NEAR: Final = 0.8
_METHODS: Final = ("DELETE", "GET", "HEAD", "POST")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where the log is, and what is served; `config.gateway` says how."""

    config: DeploymentConfig
    nats_url: str
    credentials: Credentials = NOBODY
    prefix: str = "ds"


async def run(options: GatewayOptions, listening: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled; then end in order. `listening` learns the URL.

    Raises:
        ClientError: the address cannot be listened on, or the keys cannot be read.
    """
    settings = options.config.gateway
    keys = api_keys(settings)
    listener = server.bind(settings.host, settings.port)
    gateway = Gateway(Served.of(options.config), Subjects(options.prefix), new_origin(), settings)
    app = create_app(gateway, keys, logs_requests=options.config.logs.requests)
    _LOGGER.info("listening on %s", server.url_of(listener))
    if listening is not None:
        listening(server.url_of(listener))
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(_follow(gateway, options), name="log")
        async with server.serving(app, listener, settings):
            try:
                await asyncio.Event().wait()  # until cancelled
            finally:
                await _drain(gateway, settings.drain_s)
                following.cancel()  # what still runs ends with a typed error, and then the server
                await asyncio.wait({following})


def create_app(
    gateway: Gateway, keys: Sequence[ApiKey] = (), *, logs_requests: bool = True
) -> fastapi.FastAPI:
    """The ASGI application over one gateway's state; `gateway.settings` and `keys` say who may pass."""
    app = GatewayApp(
        title="Dal Segno", version=version("dalsegno"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.gateway, app.keys, app.logs_requests = gateway, keys, logs_requests
    for routes in (
        about_routes,
        health_routes,
        metrics_routes,
        generate_routes,
        speech_routes,
        embedding_routes,
        warm_routes,
        openai_routes,
        request_routes,
    ):
        app.include_router(routes(gateway))
    for kind, handler in _HANDLERS:
        app.add_exception_handler(kind, handler)
    openapi.complete(app, needs_key=bool(keys))
    return app


def new_origin() -> str:
    """A gateway's name on the log, for one life."""
    return f"g-{secrets.token_hex(4)}"


async def _follow(gateway: Gateway, options: GatewayOptions) -> None:
    """Connect to the log and follow it; again, whenever it was made anew. Never gives up."""
    said = ""
    while True:
        try:
            log = await jetstream.connect(
                options.nats_url,
                credentials=options.credentials,
                subjects=gateway.subjects,
                name=f"gateway {gateway.origin}",
                durability=options.config.nats.durability,
            )
        except (LogUnavailableError, DurabilityError) as error:
            if error.message != said:  # once per reason, not five times a second
                said = error.message
                _LOGGER.warning("waiting for the log: %s", said)
            await asyncio.sleep(_RETRY_S)
            continue
        said = ""
        try:
            await gateway.follow(log)
        except* (LogRegressedError, LogUnavailableError) as group:
            _LOGGER.warning("following the log anew: %s", group.exceptions)
        finally:
            await log.close()
        await asyncio.sleep(_RETRY_S)


async def _drain(gateway: Gateway, deadline_s: float) -> None:
    running = gateway.running
    if running:
        _LOGGER.info("answers still to finish: %d, for at most %g s", running, deadline_s)
    if not await gateway.drain(deadline_s):
        _LOGGER.warning("answers cut, as they did not end in time: %d", gateway.running)


async def _on_error(request: Request, error: Exception) -> Response:
    return _response(errors.of_exception(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refused: an unknown route, a wrong method, a form it could not read."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message = f"there is no route {where}; {_meant(request)}"
            found = HttpError(status=404, code="not_found", message=message)
        case 405:
            allowed = _methods_of(request)
            message = f"{where} is not allowed; expected {allowed}"
            found = HttpError(status=405, code="method_not_allowed", message=message)
            return _response(found, {"allow": allowed})
        case status:
            found = HttpError(status=status, code="invalid_request", message=str(error.detail))
    return _response(found, dict(error.headers or {}))


def _meant(request: Request) -> str:
    """What a path that is none may mean: most often the base URL has a `/v1` too many, or too few."""
    asked = request.url.path[:_LONGEST_PATH].rstrip("/")
    paths = [path for path in request.app.openapi()["paths"] if path != "/"]
    near = [path for path in paths if asked and (path.endswith(asked) or asked.endswith(path))]
    meant = near[0] if near else closest_match(asked, paths, cutoff=_NEAR)
    return f"did you mean {meant}?" if meant else "GET /openapi.json has those there are"


def _methods_of(request: Request) -> str:
    """What the path takes: it may be several routes', and the framework names the first one's alone."""

    def taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return ", ".join(filter(taken, _METHODS))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"])
    return _response(
        HttpError(status=400, code="invalid_value", message=f"{param}: {first['msg']}", param=param)
    )


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client left before its request was read whole: nobody reads this."""
    return Response(status_code=400)


def _response(error: HttpError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error.json, error.status, {**(headers or {}), **error.headers}, media_type="application/json"
    )


_Handler = Callable[[Request, Exception], Coroutine[Any, Any, Response]]
_HANDLERS: Final[list[tuple[type[Exception], _Handler]]] = [
    (ClientDisconnect, _on_client_gone),
    (DalSegnoError, _on_error),
    (HTTPException, _on_http_exception),
    (RequestValidationError, _on_validation_error),
    (Exception, _on_error),
]
