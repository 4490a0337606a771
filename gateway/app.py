"""The gateway process: it composes routes and middleware, serves them, and follows the log.

The socket is bound first, so that `/health/live` answers at once; the log may connect later, and reconnect. A
gateway that is stopped finishes its answers (for up to `drain_s`), refuses new requests with 503, and closes.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from configs.deployment import DeploymentConfig
from configs.secrets import ApiKey, api_keys
from gateway import errors, openapi
from gateway.anthropic.routes import anthropic_routes
from gateway.batches.live import LiveBatches
from gateway.batches.routes import batch_routes
from gateway.batches.runner import BatchRunner
from gateway.errors import ErrorResponse, HttpError
from gateway.generate.routes import generate_routes
from gateway.http import server
from gateway.images.routes import image_routes
from gateway.media.file_routes import file_routes
from gateway.middleware.refusals import unread
from gateway.middleware.stack import GatewayApp
from gateway.ollama.routes import ollama_routes
from gateway.openai.routes import openai_routes
from gateway.openai.tokenization import tokenization_routes
from gateway.operations.adapter_routes import adapter_routes
from gateway.operations.engine_routes import engine_routes
from gateway.operations.request_routes import request_routes
from gateway.operations.service_routes import service_routes
from gateway.page.routes import page_routes
from gateway.policy.routes import policy_routes, serves_actions
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from gateway.responses.conversations.routes import conversation_routes
from gateway.responses.routes import response_routes
from gateway.served_model import ServedModel
from gateway.speech.routes import speech_routes
from gateway.texts.embeddings import embedding_routes
from gateway.texts.rerank import rerank_routes
from gateway.texts.score import score_routes
from gateway.transcriptions.routes import transcription_routes
from gateway.videos.routes import video_routes
from shared.closest_match import closest_match
from shared.errors import DalSegnoError
from shared.log.nats import jetstream
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.port import DurabilityError, Log, LogRegressedError, LogUnavailableError
from shared.media import jetstream as media_jetstream
from shared.media.store import MediaStore
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_S: Final = 0.2
_LAST_REFUSALS_S: Final = 2.0
"""The time in which a gateway that ends may store what it has refused."""
_LONGEST_PATH: Final = 200
_NEAR: Final = 0.8
_METHODS: Final = ("DELETE", "GET", "HEAD", "POST", "PUT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The deployment's configuration, and the address of its log."""

    config: DeploymentConfig
    nats_url: str
    credentials: Credentials = ANONYMOUS
    prefix: str = "ds"


async def run(options: GatewayOptions, listening: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled, then shut down in order. `listening` is called with the URL.

    Raises:
        ClientError: the address cannot be listened on, or the keys cannot be read.
    """
    settings = options.config.gateway
    keys = api_keys(settings)
    listener = server.bind(settings.host, settings.port)
    gateway = Gateway(
        ServedModel.of(options.config),
        Subjects(options.prefix),
        new_origin(),
        settings,
        options.config.media,
        options.config.nats.max_age_s,
    )
    live, second = LiveBatches(), SecondLog()
    app = create_app(gateway, keys, batches=live, second=second, logs_requests=options.config.logs.requests)
    _LOGGER.info("listening on %s", server.url_of(listener))
    if listening is not None:
        listening(server.url_of(listener))
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(_follow(gateway, options), name="log")
        open_log = partial(_log_with_room, gateway, options)
        recording = tasks.create_task(gateway.refusals.run(open_log), name="refusals")
        batches = BatchRunner(gateway, app.answer, live, second)
        running = tasks.create_task(batches.run(partial(_log, gateway, options, "second")), name="batches")
        async with server.serving(
            app,
            listener,
            settings,
            logs_requests=options.config.logs.requests,
            websockets=serves_actions(gateway),
            on_refusal=unread(gateway.refusals.add),
        ):
            try:
                await asyncio.Event().wait()  # until cancelled
            finally:
                running.cancel()  # other gateways take its batches over
                await asyncio.wait({running})
                await _drain(gateway, settings.drain_s)
                await gateway.refusals.finish(open_log, _LAST_REFUSALS_S)
                recording.cancel()
                following.cancel()  # answers still in progress end with a typed error, then the server ends
                await asyncio.wait({following})


def create_app(
    gateway: Gateway,
    keys: Sequence[ApiKey] = (),
    *,
    batches: LiveBatches | None = None,
    second: SecondLog | None = None,
    logs_requests: bool = True,
) -> GatewayApp:
    """The ASGI application of one gateway.

    Args:
        gateway: its state.
        keys: the API keys, if requests need one.
        batches: what is known of running batches; None if this gateway runs none.
        second: the connection for events of batches and conversations; None: it takes none.
        logs_requests: write an access log.
    """
    app = GatewayApp(
        title="Dal Segno", version=version("dalsegno"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.gateway, app.keys, app.logs_requests = gateway, keys, logs_requests
    app.takes_media = gateway.served.takes_media
    second = second or SecondLog()
    for routes in (
        page_routes,
        service_routes,
        generate_routes,
        speech_routes,
        transcription_routes,
        image_routes,
        video_routes,
        embedding_routes,
        rerank_routes,
        score_routes,
        file_routes,
        partial(batch_routes, live=batches or LiveBatches(), second=second),
        policy_routes,
        engine_routes,
        adapter_routes,
        anthropic_routes,
        ollama_routes,
        tokenization_routes,
        partial(response_routes, second=second),
        partial(conversation_routes, second=second),
        openai_routes,
        request_routes,
    ):
        router = routes(gateway)
        app.include_router(router)
        app.known_paths |= {one.path for one in router.routes if isinstance(one, APIRoute)}
        _answer_head_requests(app, router)
    for kind, handler in _HANDLERS:
        app.add_exception_handler(kind, handler)
    openapi.complete(app, needs_key=bool(keys))
    return app


def _answer_head_requests(app: fastapi.FastAPI, router: fastapi.APIRouter) -> None:
    """Let a router's routes with GET answer HEAD as well; the server leaves the body out."""
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def new_origin() -> str:
    """A new name for a gateway process on the log."""
    return f"g-{secrets.token_hex(4)}"


async def _follow(gateway: Gateway, options: GatewayOptions) -> None:
    """Connect to the log and follow it, again and again: never gives up."""
    warned = ""
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
            if error.message != warned:  # once per reason, not five times a second
                warned = error.message
                _LOGGER.warning("waiting for the log: %s", warned)
            await asyncio.sleep(_RETRY_S)
            continue
        warned = ""
        try:
            async with _media_store(gateway, options) as media:
                await gateway.follower.follow(log, media)
        except* (LogRegressedError, LogUnavailableError) as group:
            _LOGGER.warning("reconnecting to the log: %s", group.exceptions)
        finally:
            await log.close()
        await asyncio.sleep(_RETRY_S)


@asynccontextmanager
async def _log_with_room(gateway: Gateway, options: GatewayOptions) -> AsyncGenerator[Log, None]:
    """The log over a connection of its own, for one event that requests can do without.

    Raises:
        CapacityError: the log has no room for new requests, or does not answer.
        DalSegnoError: it cannot be connected to.
    """
    gateway.connection.room.require_capacity()
    async with _log(gateway, options, "refusals") as log:
        yield log


@asynccontextmanager
async def _log(gateway: Gateway, options: GatewayOptions, purpose: str) -> AsyncGenerator[Log, None]:
    """The log over a connection of its own, which is named after its purpose.

    Raises:
        DalSegnoError: it cannot be connected to.
    """
    log = await jetstream.connect(
        options.nats_url,
        credentials=options.credentials,
        subjects=gateway.subjects,
        name=f"gateway {gateway.origin}, {purpose}",
        durability=options.config.nats.durability,
    )
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def _media_store(gateway: Gateway, options: GatewayOptions) -> AsyncGenerator[MediaStore, None]:
    """The media store on the log's server, over a connection of its own."""
    store = await media_jetstream.connect(
        options.nats_url,
        credentials=options.credentials,
        subjects=gateway.subjects,
        name=f"gateway {gateway.origin}",
        may_delete=True,
    )
    try:
        yield store
    finally:
        await store.close()


async def _drain(gateway: Gateway, deadline_s: float) -> None:
    running = gateway.in_flight.count
    if running:
        _LOGGER.info("waiting for %d answers to finish, for at most %g s", running, deadline_s)
    if not await gateway.drain(deadline_s):
        _LOGGER.warning("%d answers were cut off: they did not end in time", gateway.in_flight.count)


async def _on_error(request: Request, error: Exception) -> Response:
    return ErrorResponse(errors.of_exception(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the framework: an unknown route, a wrong method, a malformed form."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message = f"there is no route {where}; {_suggestion(request)}"
            found = HttpError(status=404, code="not_found", message=message)
        case 405:
            allowed = _methods_of(request)
            message = f"{where} is not allowed; expected {allowed}"
            found = HttpError(status=405, code="method_not_allowed", message=message)
            return ErrorResponse(found, {"allow": allowed})
        case status:
            found = HttpError(status=status, code="invalid_request", message=str(error.detail))
    return ErrorResponse(found, error.headers)


def _suggestion(request: Request) -> str:
    """A known path like the unknown one: usually the base URL has one `/v1` too many or too few."""
    unknown = request.url.path[:_LONGEST_PATH].rstrip("/")
    paths = [path for path in request.app.openapi()["paths"] if path != "/"]
    near = [path for path in paths if unknown and (path.endswith(unknown) or unknown.endswith(path))]
    meant = near[0] if near else closest_match(unknown, paths, cutoff=_NEAR)
    return f"did you mean {meant}?" if meant else "GET /openapi.json lists all routes"


def _methods_of(request: Request) -> str:
    """The methods of a path. It may have several routes, and the framework names those of the first alone."""

    def is_allowed(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return ", ".join(filter(is_allowed, _METHODS))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"])
    return ErrorResponse(
        HttpError(status=400, code="invalid_value", message=f"{param}: {first['msg']}", param=param)
    )


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client disconnected before its request was read: the response is discarded."""
    return Response(status_code=400)


_Handler = Callable[[Request, Exception], Coroutine[Any, Any, Response]]
_HANDLERS: Final[list[tuple[type[Exception], _Handler]]] = [
    (ClientDisconnect, _on_client_gone),
    (DalSegnoError, _on_error),
    (HTTPException, _on_http_exception),
    (RequestValidationError, _on_validation_error),
    (Exception, _on_error),
]
