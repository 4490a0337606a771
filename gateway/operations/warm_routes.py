"""`POST /warm`: have a beginning computed, for requests that will have it in common.

Not OpenAI's. The fields are `/generate`'s, as far as they say what a prompt is.
"""

import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway import request_limits
from gateway.client_key import key_name
from gateway.errors import HttpError
from gateway.generate.request import FIELDS, QUESTIONS, parse
from gateway.http.bodies import check_known, read_object
from gateway.requests.response import Answer, Format, Question
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Recorded, request_id_of
from shared.events import OutputChunk, Params, Usage
from shared.log.port import Durability

WARM: Final = "/warm"
WARM_FIELDS: Final = {
    name: FIELDS[name] for name in (*QUESTIONS, "chat", "request_id", "model", "timeout_s", "priority")
}
_SCHEMA: Final = {
    "type": "object",
    "oneOf": [{"required": [name]} for name in QUESTIONS],
    "properties": WARM_FIELDS,
}
_BODY: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}
}


@dataclass(slots=True)
class WarmDocument:
    """How much of the prompt is kept now."""

    request_id: str
    durability: Durability
    media_type: str = "application/json"

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode(
            {
                "request_id": self.request_id,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "durability": self.durability,
            }
        )

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")


def warm_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["generate"])

    @router.post(WARM, summary="Compute a beginning that requests will have in common", openapi_extra=_BODY)
    async def warm(request: Request) -> Response:
        fields = await read_object(request)
        for name in fields:
            check_known(name, WARM_FIELDS)
        parsed = parse(fields, gateway.served)
        request_limits.check_messages(len(parsed.inputs.messages or []), gateway.settings)
        asked = Asked(
            request_id=request_id_of(parsed.request_id, "warm"),
            id_is_chosen=parsed.request_id is not None,
            model=parsed.model or gateway.served.name,
            inputs=parsed.inputs,
            params=Params(warm=True),
            created_s=int(time.time()),
            trace=request.headers.get("traceparent"),
            timeout_s=request_limits.limit_s(parsed.timeout_s, gateway.settings),
            priority=parsed.priority,
            tenant=key_name(request.scope),
        )

        def form(recorded: Recorded) -> Format:
            return WarmDocument(asked.request_id, recorded.durability)

        return Answer(gateway, Question(route=WARM, parts=[asked]), form)

    return router
