"""`/v1/*`: OpenAI's routes, as far as one text model can serve them."""

import time
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.answer import Answer, Format
from gateway.bodies import read_object
from gateway.openai_answers import ChatDocument, ChatStream, CompletionDocument, CompletionStream, Head
from gateway.openai_requests import ChatRequest, CompletionRequest, parse
from gateway.service import Gateway
from gateway.submission import Asked, request_id_of

_R = TypeVar("_R", ChatRequest, CompletionRequest)


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

    @router.post("/chat/completions", summary="Answer a chat", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        asked, body = _asked(gateway, ChatRequest, await read_object(request), request, "chatcmpl")
        head = _head(gateway, asked)
        form: Format = ChatStream(head, body.includes_usage) if body.stream else ChatDocument(head)
        return Answer(gateway, asked, form)

    @router.post("/completions", summary="Continue a prompt", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked, body = _asked(gateway, CompletionRequest, await read_object(request), request, "cmpl")
        head = _head(gateway, asked)
        form: Format = (
            CompletionStream(head, body.includes_usage) if body.stream else CompletionDocument(head)
        )
        return Answer(gateway, asked, form)

    return router


def _asked(
    gateway: Gateway, kind: type[_R], raw: dict[str, Any], request: Request, prefix: str
) -> tuple[Asked, _R]:
    body = parse(kind, raw)
    gateway.served.check_model(body.model)
    asked = Asked(
        request_id=request_id_of(body.request_id, prefix),
        id_is_chosen=body.request_id is not None,
        model=body.model,
        inputs=body.inputs(),
        params=body.params(),
        trace=request.headers.get("traceparent"),
    )
    return asked, body


def _head(gateway: Gateway, asked: Asked) -> Head:
    return Head(request_id=asked.request_id, model=gateway.served.name, created_s=int(time.time()))


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.served.name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "dalsegno",
        "max_model_len": gateway.served.max_seq_len,
    }


def _body(kind: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """The body's schema, for `/openapi.json`: the body itself is parsed by us."""
    [schema], parts = msgspec.json.schema_components([kind], ref_template="{name}")
    content = {"application/json": {"schema": _whole(schema, parts)}}
    return {"requestBody": {"required": True, "content": content}}


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts where they are referred to: `/openapi.json` has its references elsewhere."""
    match schema:
        case {"$ref": name}:
            return _whole(parts[name], parts)
        case dict():
            return {key: _whole(value, parts) for key, value in schema.items()}
        case list():
            return [_whole(value, parts) for value in schema]
        case _:
            return schema
