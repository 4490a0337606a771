"""`POST /generate`: the native route, and `POST /warm`, which computes a prefix in advance."""

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway import request_limits
from gateway.generate.answers import ChunkLines, JsonDocument
from gateway.generate.request import FIELDS, QUESTIONS, GenerateRequest, open_body, parse
from gateway.http.bodies import check_known, read_object
from gateway.media.intake import MediaIntake
from gateway.requests import resume
from gateway.requests.parsed_request import ParsedRequest, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, DocumentFormat, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from shared.events import Params, Usage
from shared.log.port import Durability

GENERATE: Final = "/generate"
WARM: Final = "/warm"
WARM_FIELDS: Final = {
    name: FIELDS[name] for name in (*QUESTIONS, "chat", "request_id", "model", "timeout_s", "priority")
}


def _body(fields: object, *media_types: str) -> dict[str, Any]:
    """The OpenAPI description of a body with these fields, exactly one of `QUESTIONS` among them."""
    one_of = [{"required": [name]} for name in QUESTIONS]
    schema = {"type": "object", "oneOf": one_of, "properties": fields}
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in media_types}}}


@dataclass(slots=True)
class WarmDocument(DocumentFormat):
    """The answer of `/warm`: the number of the prefix's tokens that are cached now."""

    request_id: str
    durability: Durability

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode(
            {
                "request_id": self.request_id,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "durability": self.durability,
            }
        )


def generate_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["generate"])
    intake = MediaIntake(gateway)

    def submitted(http: Request, body: GenerateRequest, params: Params, id_prefix: str) -> ParsedRequest:
        request_limits.check_messages(len(body.inputs.messages or []), gateway.settings)
        request_limits.check_texts(body.inputs, gateway.settings)
        return parsed_request(
            http,
            body,
            gateway.settings,
            id_prefix=id_prefix,
            model=body.model or gateway.served.name,
            inputs=body.inputs,
            params=params,
        )

    @router.post(
        GENERATE,
        summary="Answer one message",
        openapi_extra=_body(FIELDS, "multipart/form-data", "application/json"),
    )
    async def generate(request: Request) -> Response:
        async with open_body(request, intake.form_limits) as fields:
            body = parse(fields, gateway.served, intake)
            request_limits.check_params(body.params, gateway.settings, "model_kwargs.max_tokens")
            parsed = submitted(request, body, body.params, "gen")
            position = resume.requested_position(
                request, 1, is_stream=body.streaming, id_is_chosen=parsed.id_is_chosen
            )
            [parsed] = await intake.attach([parsed], body.media)

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            if body.streaming:
                return ChunkLines(
                    recorded.durability,
                    position,
                    tensor_format=body.tensor_format,
                    joins_files=body.joins_files,
                )
            return JsonDocument(parsed.request_id, recorded.durability, body.tensor_format)

        group = RequestGroup(
            route=GENERATE,
            requests=[replace(parsed, is_resumed=position.has_any(0))],
            is_stream=body.streaming,
            media_places=[source.where for source in body.media],
        )
        return AnswerResponse(gateway, group, make_format)

    @router.post(
        WARM,
        summary="Compute a prefix that requests will have in common",
        openapi_extra=_body(WARM_FIELDS, "application/json"),
    )
    async def warm(request: Request) -> Response:
        fields = await read_object(request)
        for name in fields:
            check_known(name, WARM_FIELDS)
        body = parse(fields, gateway.served, intake)
        [parsed] = await intake.attach([submitted(request, body, Params(warm=True), "warm")], body.media)

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            return WarmDocument(parsed.request_id, recorded.durability)

        return AnswerResponse(
            gateway,
            RequestGroup(route=WARM, requests=[parsed], media_places=[one.where for one in body.media]),
            make_format,
        )

    return router
