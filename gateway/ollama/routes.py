"""`/api/*`: Ollama's routes that one served model can answer."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.errors import InvalidParamError
from gateway.http.bodies import body_schema, check_known, read_object
from gateway.media import parts
from gateway.media.intake import MediaIntake
from gateway.ollama import models
from gateway.ollama.answers import Document, Head, Lines
from gateway.ollama.embeddings import EmbedBody, EmbedDocument, parse_embed
from gateway.ollama.request import ChatBody, GenerateBody, in_ollamas_words, parse_chat, parse_generate
from gateway.openai import requests as openai
from gateway.openai.answer_reader import AnswerParts
from gateway.openai.requests import ChatRequest, CompletionRequest
from gateway.openai.routes import chat_group
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.texts.embeddings import EmbeddingRequest, embedded
from gateway.texts.rows import Outputs
from shared.errors import ClientError

CHAT: Final = "/api/chat"
GENERATE: Final = "/api/generate"
EMBED: Final = "/api/embed"
OLLAMA_VERSION: Final = "0.14.2"
"""The version of Ollama whose routes these are: its clients refuse older ones (Copilot in VS Code, 0.6.4)."""
NOT_SERVED: Final = ("embeddings", "create", "copy", "delete", "pull", "push", "blobs")
"""Ollama's other routes, by their path after `/api/`."""


class NotServedError(ClientError):
    """A route of Ollama that this gateway does not serve."""

    code = "not_served"
    status = 404

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path[:200]} is a route of Ollama that is not served here; expected one of "
            f"POST {CHAT}, POST {GENERATE}, POST {EMBED}, GET /api/tags, POST /api/show, GET /api/ps, "
            "GET /api/version"
        )


def ollama_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/api", tags=["Ollama"])
    intake = MediaIntake(gateway)

    @router.post("/chat", summary="Answer a chat", openapi_extra=body_schema(ChatBody))
    async def chat(request: Request) -> Response:
        asked, fields = parse_chat(await read_object(request))
        return await _answer(gateway, intake, request, (asked.model, CHAT), fields, is_chat=True)

    @router.post("/generate", summary="Answer a prompt", openapi_extra=body_schema(GenerateBody))
    async def generate(request: Request) -> Response:
        asked, fields = parse_generate(await read_object(request))
        return await _answer(gateway, intake, request, (asked.model, GENERATE), fields, is_chat=False)

    @router.post("/embed", summary="Make embeddings of texts", openapi_extra=body_schema(EmbedBody))
    async def embed(request: Request) -> Response:
        asked, fields = parse_embed(await read_object(request))
        fields["model"] = models.known_name(gateway, asked.model)

        def make_document(_: EmbeddingRequest, outputs: Outputs) -> AnswerFormat:
            return EmbedDocument(asked.model, outputs)

        return await embedded(gateway, intake, request, fields, make_document, EMBED)

    @router.get("/tags", summary="The served model, and its adapters")
    async def tags() -> dict[str, Any]:
        return {"models": models.listed(gateway)}

    @router.get("/ps", summary="The loaded models")
    async def loaded() -> dict[str, Any]:
        return {"models": models.running(gateway)}

    @router.post("/show", summary="What the served model can do")
    async def show(request: Request) -> dict[str, Any]:
        body = await read_object(request)
        for field in body:
            check_known(field, _SHOWN, what="no field of this route")
        name = body.get("model", body.get("name"))
        if not isinstance(name, str):
            raise InvalidParamError("model", "model: expected the name of a model, found none")
        models.known_name(gateway, name)
        return models.described(gateway)

    @router.get("/version", summary="The version of Ollama's API, and that of this server")
    async def versions() -> dict[str, str]:
        return {"version": OLLAMA_VERSION, "dalsegno": version("dalsegno")}

    for name in NOT_SERVED:
        for path in (f"/{name}", f"/{name}/{{rest:path}}"):
            router.add_api_route(path, _not_served, methods=list(_METHODS), include_in_schema=False)
    return router


_SHOWN: Final = ("model", "name", "verbose")
_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")


async def _not_served(request: Request) -> Response:
    raise NotServedError(request.method, request.url.path)


async def _answer(
    gateway: Gateway,
    intake: MediaIntake,
    request: Request,
    asked: tuple[str, str],
    fields: dict[str, Any],
    *,
    is_chat: bool,
) -> Response:
    """The response; `asked` is the model as the client wrote it, and the route."""
    begun_s = time.perf_counter()
    model, route = asked
    fields["model"] = models.known_name(gateway, model)
    if not fields.get("prompt") and not fields.get("messages"):
        head = Head(request_id="", model=model, created_s=int(time.time()), is_chat=is_chat)
        return Response(msgspec.json.encode(head.loaded()), media_type="application/json")
    try:
        if "prompt" in fields:
            body = openai.parse(CompletionRequest, fields, gateway.served.options)
            group, _ = chat_group(gateway, body, request, route, "ollama")
        else:
            group = await _chat(gateway, intake, request, route, fields)
    except ClientError as error:
        raise in_ollamas_words(error, is_chat=is_chat) from error
    return AnswerResponse(gateway, group, _format_of(gateway, group, model, begun_s, is_chat=is_chat))


async def _chat(
    gateway: Gateway, intake: MediaIntake, request: Request, route: str, fields: dict[str, Any]
) -> RequestGroup:
    placed = parts.place(fields["messages"], check_modality=intake.check_modality)
    body = openai.parse(ChatRequest, {**fields, "messages": placed.messages}, gateway.served.options)
    group, _ = chat_group(gateway, body, request, route, "ollama")
    return replace(group, requests=await intake.attach(group.requests, placed.sources))


def _format_of(
    gateway: Gateway, group: RequestGroup, model: str, begun_s: float, *, is_chat: bool
) -> Callable[[SubmissionRecord], AnswerFormat]:
    def make_format(recorded: SubmissionRecord) -> AnswerFormat:
        head = Head(
            request_id=group.request_id,
            model=model,
            created_s=recorded.created_s,
            is_chat=is_chat,
            parts=AnswerParts.of(gateway, group.requests[0].inputs),
            begun_s=begun_s,
        )
        return Lines(head) if group.is_stream else Document(head)

    return make_format
