"""`POST /generate`: the native route."""

import time
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway import request_limits
from gateway.client_key import key_name
from gateway.generate.answers import ChunkLines, Document
from gateway.generate.request import FIELDS, QUESTIONS, read
from gateway.requests import resume
from gateway.requests.response import Answer, Format, Question
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Recorded, request_id_of

_QUESTIONS: Final = [{"required": [name]} for name in QUESTIONS]
_SCHEMA: Final = {"type": "object", "oneOf": _QUESTIONS, "properties": FIELDS}
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": _SCHEMA} for kind in ("multipart/form-data", "application/json")},
    }
}


def generate_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["generate"])

    @router.post("/generate", summary="Answer one message", openapi_extra=_BODY)
    async def generate(request: Request) -> Response:
        parsed = await read(request, gateway.served)
        request_limits.check_params(parsed.params, gateway.settings, "model_kwargs.max_tokens")
        request_limits.check_messages(len(parsed.inputs.messages or []), gateway.settings)
        asked = Asked(
            request_id=request_id_of(parsed.request_id, "gen"),
            id_is_chosen=parsed.request_id is not None,
            model=parsed.model or gateway.served.name,
            inputs=parsed.inputs,
            params=parsed.params,
            created_s=int(time.time()),
            trace=request.headers.get("traceparent"),
            timeout_s=request_limits.limit_s(parsed.timeout_s, gateway.settings),
            linger_s=parsed.linger_s or 0.0,
            priority=parsed.priority,
            tenant=key_name(request.scope),
        )
        position = resume.asked_for(request, 1, is_stream=parsed.streaming, id_is_chosen=asked.id_is_chosen)

        def form(recorded: Recorded) -> Format:
            if parsed.streaming:
                return ChunkLines(recorded.durability, position)
            return Document(asked.request_id, recorded.durability)

        part = replace(asked, is_resumed=position.has_any(0))
        return Answer(gateway, Question(route="/generate", parts=[part]), form)

    return router
