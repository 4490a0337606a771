"""`/v1/*`: the routes of OpenAI that one text model can serve.

The other routes of OpenAI are known by name, so that the error can list those that are served.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.client_key import key_name
from gateway.http.bodies import body_schema, read_object
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.openai import anthropic_models
from gateway.openai.answer_reader import TEXT_ALONE, AnswerParts
from gateway.openai.answers import AnswerHead, ChatDocument, ChatStream, CompletionDocument, CompletionStream
from gateway.openai.earlier_sound import with_transcripts
from gateway.openai.models import model_document, model_documents
from gateway.openai.outputs import check_outputs
from gateway.openai.requests import ChatRequest, CompletionRequest, parse
from gateway.openai.sound import AUDIO, ID_PREFIX, ChatSound, SoundFields, check_sound, kind_of
from gateway.requests import resume
from gateway.requests.choices import split
from gateway.requests.parsed_request import parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.resume import StreamPosition
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.sound.encoder import PcmFormat
from models.text.tool_calls import offered
from shared.errors import ClientError

_R = TypeVar("_R", ChatRequest, CompletionRequest)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
NOT_SERVED: Final = (
    "assistants", "containers", "evals", "fine_tuning",
    "moderations", "organization", "realtime", "threads", "uploads", "vector_stores",
)  # fmt: skip
"""OpenAI's other routes, by their path after `/v1/`."""


_NEVER_S: Final = 2**31 - 1
"""The expiry of what is kept for ever: OpenAI's clients expect a time."""
_ROUTES: Final = {
    "transcript": "/v1/audio/transcriptions",
    "audio": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "video": "/v1/videos",
    "score": "/v1/rerank",
    "embedding": "/v1/embeddings",
}
"""The routes of outputs other than text."""


class NoTextError(ClientError):
    """The model does not answer in text."""

    code = "unsupported_modality"
    param = "model"

    def __init__(self, name: str, outputs: Sequence[str]) -> None:
        route = next((route for output, route in _ROUTES.items() if output in outputs), "/generate")
        super().__init__(
            f"the outputs of the model {name!r} are {', '.join(outputs)}, and not text; "
            f"ask it with POST {route}"
        )


class NoToolsError(ClientError):
    """The model does not support tools."""

    code = "tools_not_supported"
    param = "tools"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"tools: the model {name!r} has no tool calls, or writes them in an unknown format; send the "
            "request without tools, or serve a checkpoint whose chat template takes them"
        )


class NotServedError(ClientError):
    """A route of OpenAI that this gateway does not serve."""

    code = "not_served"
    status = 404

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path[:200]} is a route of OpenAI that is not served here; expected one of "
            f"POST {CHAT}, POST {COMPLETIONS}, POST /v1/responses, POST /v1/embeddings, "
            "POST /v1/rerank, POST /v1/score, POST /v1/audio/speech, POST /v1/audio/transcriptions, "
            "POST /v1/audio/translations, "
            "POST /v1/images/generations, POST /v1/images/edits, POST /v1/videos, POST /v1/files, "
            "POST /v1/batches, POST /v1/conversations, GET /v1/models"
        )


def openai_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    intake = MediaIntake(gateway)

    @router.get("/models", summary="The model this deployment serves, and its adapters")
    async def models(request: Request) -> dict[str, Any]:
        if anthropic_models.are_asked(request):
            return anthropic_models.model_list(gateway)
        return {"object": "list", "data": model_documents(gateway)}

    @router.get("/models/{model:path}", summary="One model")
    async def one_model(model: str, request: Request) -> dict[str, Any]:
        gateway.served.check_model(model)
        if anthropic_models.are_asked(request):
            return anthropic_models.model_document(gateway, model)
        return model_document(gateway, model)

    @router.post("/chat/completions", summary="Answer a chat", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        fields = await read_object(request)
        placed = parts.place(fields.get("messages"), check_modality=intake.check_modality)
        messages = await with_transcripts(gateway, placed.messages, key_name(request.scope))
        if messages is not fields.get("messages"):
            fields = {**fields, "messages": messages}
        body = parse(ChatRequest, fields, gateway.served.options)
        group, position = chat_group(gateway, body, request, CHAT, "chatcmpl")
        group = replace(
            group,
            requests=await intake.attach(group.requests, placed.sources),
            media_places=[source.where for source in placed.sources],
        )
        return _answer(gateway, body, group, position, (ChatStream, ChatDocument))

    @router.post("/completions", summary="Continue a prompt", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await read_object(request), gateway.served.options)
        group, position = chat_group(gateway, body, request, COMPLETIONS, "cmpl")
        return _answer(gateway, body, group, position, (CompletionStream, CompletionDocument))

    for name in NOT_SERVED:
        for path in (f"/{name}", f"/{name}/{{rest:path}}"):
            router.add_api_route(path, _not_served, methods=list(_METHODS), include_in_schema=False)
    return router


_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def _not_served(request: Request) -> Response:
    raise NotServedError(request.method, request.url.path)


def _answer(
    gateway: Gateway,
    body: ChatRequest | CompletionRequest,
    group: RequestGroup,
    position: StreamPosition,
    formats: tuple[type[ChatStream | CompletionStream], type[ChatDocument | CompletionDocument]],
) -> AnswerResponse:
    """The response, in the first of the formats if it is streamed, else in the second."""
    stream, document = formats

    def make_format(recorded: SubmissionRecord) -> AnswerFormat:
        head = _head(gateway, group, recorded, body)
        if body.stream:
            return stream(head, usage=body.stream_usage, position=position)
        return document(head)

    return AnswerResponse(gateway, group, make_format)


def chat_group(
    gateway: Gateway, body: _R, request: Request, route: str, prefix: str
) -> tuple[RequestGroup, StreamPosition]:
    """The requests of an HTTP request, and the position after which a stream of its answer begins."""
    gateway.served.check_model(body.model)
    if "text" not in gateway.served.outputs:
        raise NoTextError(gateway.served.name, gateway.served.outputs)
    settings = gateway.settings
    check_outputs(body.outputs, gateway.served)
    prompts = body.prompts(settings)
    voice = check_sound(
        body.sound,
        body.outputs,
        is_stream=bool(body.stream),
        has_tools=offered(prompts[0]) is not None,
        served=gateway.served,
    )
    if offered(prompts[0]) and gateway.liveness.every_worker_was_ready and gateway.tool_calls is None:
        raise NoToolsError(gateway.served.name)
    params = msgspec.structs.replace(body.params(settings), voice=voice)
    parsed = parsed_request(
        request, body, settings, id_prefix=prefix, model=body.model, inputs=prompts[0], params=params
    )
    choices = split(parsed, prompts, body.answers)
    position = resume.requested_position(
        request, len(choices), is_stream=bool(body.stream), id_is_chosen=parsed.id_is_chosen
    )
    choices = [replace(one, is_resumed=position.has_any(number)) for number, one in enumerate(choices)]
    is_stream = bool(body.stream)
    return RequestGroup(route=route, requests=choices, n=body.answers, is_stream=is_stream), position


def _parts(gateway: Gateway, group: RequestGroup, body: ChatRequest | CompletionRequest) -> AnswerParts:
    if not isinstance(body, ChatRequest):
        return TEXT_ALONE
    return AnswerParts.of(
        gateway,
        group.requests[0].inputs,
        is_separate=body.separate_reasoning is not False,
        is_shown=body.include_reasoning is not False,
    )


def _head(
    gateway: Gateway,
    group: RequestGroup,
    recorded: SubmissionRecord,
    body: ChatRequest | CompletionRequest,
) -> AnswerHead:
    return AnswerHead(
        request_id=group.request_id,
        model=group.requests[0].model,
        created_s=recorded.created_s,
        choices=len(group.requests),
        with_logprobs=group.requests[0].params.logprobs is not None,
        parts=_parts(gateway, group, body),
        sound=None if body.sound is None else _sound(gateway, group, recorded, body.sound),
        shows_prompt=body.shows_prompt,
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _sound(
    gateway: Gateway, group: RequestGroup, recorded: SubmissionRecord, sound: SoundFields
) -> ChatSound:
    age_s = gateway.log_max_age_s
    return ChatSound(
        kind=kind_of(sound),
        pcm_format=PcmFormat.of(gateway.served.media[AUDIO]),
        ids=[f"{ID_PREFIX}{one.request_id}" for one in group.requests],
        expires_s=_NEVER_S if age_s is None else recorded.created_s + int(age_s),
    )
