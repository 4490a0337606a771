"""`/v1/*`: OpenAI's routes, as far as one text model can serve them.

Those of OpenAI's that are not served are known by name, so that a client learns what is.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response

from gateway import request_limits
from gateway.client_key import key_name
from gateway.http.bodies import body_schema, read_object
from gateway.openai.answers import ChatDocument, ChatStream, CompletionDocument, CompletionStream, Head
from gateway.openai.calls import Calls
from gateway.openai.requests import ChatRequest, CompletionRequest, parse
from gateway.requests import resume
from gateway.requests.choices import split
from gateway.requests.response import Answer, Format, Question
from gateway.requests.resume import Position
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Recorded, request_id_of
from models.text.tool_calls import offered
from shared.errors import ClientError
from shared.events import Inputs

_R = TypeVar("_R", ChatRequest, CompletionRequest)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
NOT_SERVED: Final = (
    "assistants", "audio/transcriptions", "audio/translations", "audio/voices", "batches", "containers",
    "conversations", "evals", "files", "fine_tuning", "images", "moderations", "organization",
    "realtime", "responses", "threads", "uploads", "vector_stores", "videos",
)  # fmt: skip
"""OpenAI's other routes, by what comes behind `/v1/`."""


class NoTextError(ClientError):
    """The model does not answer in text."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        route = (
            "; ask it with POST /v1/audio/speech" if "audio" in outputs else "; ask it with POST /generate"
        )
        super().__init__(f"the model {name!r} puts out {', '.join(outputs)} and no text{route}")


class NoToolsError(ClientError):
    """The model cannot be told of tools."""

    code = "tools_not_supported"
    param = "tools"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"tools: the model {name!r} knows none, or calls them in a way that is not known here; ask "
            "without tools, or serve a checkpoint whose chat template takes them"
        )


class NotServedError(ClientError):
    """A route of OpenAI's that this deployment has not."""

    code = "not_served"
    status = 404

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path[:200]} is a route of OpenAI's that is not served here; expected one of "
            f"POST {CHAT}, POST {COMPLETIONS}, POST /v1/embeddings, POST /v1/audio/speech, GET /v1/models"
        )


def openai_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models", summary="The model this deployment serves")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(gateway)]}

    @router.get("/models/{model:path}", summary="One model")
    async def one_model(model: str) -> dict[str, Any]:
        gateway.served.check_model(model)
        return _model(gateway)

    @router.post("/chat/completions", summary="Answer a chat", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        body = parse(ChatRequest, await read_object(request))
        question, position = _asked(gateway, body, request, CHAT, "chatcmpl")

        def form(recorded: Recorded) -> Format:
            head = _head(gateway, question, recorded)
            if body.stream:
                return ChatStream(head, includes_usage=body.includes_usage, position=position)
            return ChatDocument(head)

        return Answer(gateway, question, form)

    @router.post("/completions", summary="Continue a prompt", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_object(request))
        question, position = _asked(gateway, body, request, COMPLETIONS, "cmpl")

        def form(recorded: Recorded) -> Format:
            head = _head(gateway, question, recorded)
            if body.stream:
                return CompletionStream(head, includes_usage=body.includes_usage, position=position)
            return CompletionDocument(head)

        return Answer(gateway, question, form)

    for name in NOT_SERVED:
        for path in (f"/{name}", f"/{name}/{{rest:path}}"):
            router.add_api_route(path, _not_served, methods=list(_METHODS), include_in_schema=False)
    return router


_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def _not_served(request: Request) -> Response:
    raise NotServedError(request.method, request.url.path)


def _asked(
    gateway: Gateway, body: _R, request: Request, route: str, prefix: str
) -> tuple[Question, Position]:
    """What an HTTP request asks, and where a stream of its answer begins."""
    gateway.served.check_model(body.model)
    if "text" not in gateway.served.outputs:
        raise NoTextError(gateway.served.name, gateway.served.outputs)
    settings = gateway.settings
    prompts = body.prompts(settings)
    if offered(prompts[0]) and gateway.presence.every_worker_was_ready and gateway.tool_calls is None:
        raise NoToolsError(gateway.served.name)
    params = body.params(settings)
    asked = Asked(
        request_id=request_id_of(body.request_id, prefix),
        id_is_chosen=body.request_id is not None,
        model=body.model,
        inputs=prompts[0],
        params=params,
        created_s=int(time.time()),
        trace=request.headers.get("traceparent"),
        timeout_s=request_limits.limit_s(body.timeout_s, settings),
        linger_s=body.linger_s or 0.0,
        priority=body.priority or 0,
        tenant=key_name(request.scope),
    )
    parts = split(asked, prompts, body.answers)
    position = resume.asked_for(
        request, len(parts), is_stream=bool(body.stream), id_is_chosen=asked.id_is_chosen
    )
    parts = [replace(part, is_resumed=position.has_any(number)) for number, part in enumerate(parts)]
    return Question(route=route, parts=parts, n=body.answers), position


def _head(gateway: Gateway, question: Question, recorded: Recorded) -> Head:
    """What every piece of an answer repeats."""
    return Head(
        request_id=question.request_id,
        model=gateway.served.name,
        created_s=recorded.created_s,
        choices=len(question.parts),
        with_logprobs=question.parts[0].params.logprobs is not None,
        calls=_calls(gateway, question.parts[0].inputs),
    )


def _calls(gateway: Gateway, inputs: Inputs) -> Calls | None:
    if gateway.tool_calls is None or offered(inputs) is None:
        return None
    return Calls(gateway.tool_calls, frozenset(tool.function.name for tool in inputs.tools))


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.served.name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "dalsegno",
        "max_model_len": gateway.served.max_seq_len,
        "tool_calls": gateway.tool_calls.name if gateway.tool_calls is not None else None,
    }
