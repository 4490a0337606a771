"""`POST /v1/audio/speech`: a text, said aloud."""

import time
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway import request_limits
from gateway.client_key import key_name
from gateway.http.bodies import body_schema, read_object
from gateway.requests import resume
from gateway.requests.response import Answer, Format, Question
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, request_id_of
from gateway.speech.answers import SpeechBytes, SpeechEvents
from gateway.speech.encoder import FORMATS, Sound
from gateway.speech.request import SpeechRequest, parse

SPEECH: Final = "/v1/audio/speech"
_FILES: Final[dict[str, Any]] = {
    kind.media_type: {"schema": {"type": "string", "format": "binary"}} for kind in FORMATS.values()
}


def speech_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        SPEECH,
        summary="Say a text aloud",
        openapi_extra=body_schema(SpeechRequest),
        response_class=Response,
        responses={200: {"description": "The sound", "content": _FILES}},
    )
    async def speech(request: Request) -> Response:
        body = parse(await read_object(request), gateway.served)
        params = body.params(gateway.served, gateway.settings)
        asked = Asked(
            request_id=request_id_of(body.request_id, "speech"),
            id_is_chosen=body.request_id is not None,
            model=body.model,
            inputs=body.inputs,
            params=params,
            created_s=int(time.time()),
            trace=request.headers.get("traceparent"),
            timeout_s=request_limits.limit_s(body.timeout_s, gateway.settings),
            linger_s=body.linger_s or 0.0,
            priority=body.priority or 0,
            tenant=key_name(request.scope),
        )
        silence = Sound.of(gateway.served.media["audio"])
        form: Format
        if body.stream_format == "sse":
            position = resume.asked_for(request, 1, is_stream=True, id_is_chosen=asked.id_is_chosen)
            is_resumed = position.has_any(0)
            form = SpeechEvents(body.response_format, silence=silence, position=position)
        else:
            had_bytes = resume.asked_for_bytes(
                request, is_stream=body.is_stream, id_is_chosen=asked.id_is_chosen
            )
            is_resumed = had_bytes > 0
            form = SpeechBytes(
                body.response_format, is_stream=body.is_stream, silence=silence, had_bytes=had_bytes
            )
        question = Question(route=SPEECH, parts=[replace(asked, is_resumed=is_resumed)])
        return Answer(gateway, question, lambda _: form)

    return router
