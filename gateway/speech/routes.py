"""`POST /v1/audio/speech`: text to speech."""

from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway.http.bodies import body_schema, read_object
from gateway.requests import resume
from gateway.requests.parsed_request import parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.sound.encoder import FORMATS, PcmFormat
from gateway.speech.answers import SpeechEvents, SpeechFile
from gateway.speech.request import SpeechRequest, parse

SPEECH: Final = "/v1/audio/speech"
VOICES: Final = "/v1/audio/voices"
_FILES: Final[dict[str, Any]] = {
    kind.media_type: {"schema": {"type": "string", "format": "binary"}} for kind in FORMATS.values()
}


def speech_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        SPEECH,
        summary="Speak a text",
        openapi_extra=body_schema(SpeechRequest),
        response_class=Response,
        responses={200: {"description": "The audio", "content": _FILES}},
    )
    async def speech(request: Request) -> Response:
        body = parse(await read_object(request), gateway.served)
        parsed = parsed_request(
            request,
            body,
            gateway.settings,
            id_prefix="speech",
            model=body.model,
            inputs=body.inputs,
            params=body.params(gateway.served, gateway.settings),
        )
        pcm_format = PcmFormat.of(gateway.served.media["audio"])
        answer_format: AnswerFormat
        if body.stream_format == "sse":
            position = resume.requested_position(request, 1, is_stream=True, id_is_chosen=parsed.id_is_chosen)
            is_resumed = position.has_any(0)
            answer_format = SpeechEvents(body.response_format, pcm_format=pcm_format, position=position)
        else:
            had_bytes = resume.requested_offset(
                request, is_stream=body.is_stream, id_is_chosen=parsed.id_is_chosen
            )
            is_resumed = had_bytes > 0
            answer_format = SpeechFile(
                body.response_format, is_stream=body.is_stream, pcm_format=pcm_format, had_bytes=had_bytes
            )
        group = RequestGroup(
            route=SPEECH,
            requests=[replace(parsed, is_resumed=is_resumed)],
            is_stream=body.stream_format == "sse" or body.is_stream,
        )
        return AnswerResponse(gateway, group, lambda _: answer_format)

    @router.get(VOICES, summary="The voices of the served model, the usual one first")
    async def voices() -> dict[str, Any]:
        return {"voices": [*gateway.served.voices]}

    return router
