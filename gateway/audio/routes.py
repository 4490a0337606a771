"""`POST /v1/audio/speech`: a text, said aloud."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway import caps
from gateway.answer import Answer, Format, Question
from gateway.audio.answers import SpeechBytes, SpeechEvents
from gateway.audio.encoder import FORMATS, Sound
from gateway.audio.request import SpeechRequest, parse
from gateway.bodies import body_schema, read_object
from gateway.service import Gateway
from gateway.submission import Asked, request_id_of

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
            trace=request.headers.get("traceparent"),
            linger_s=body.linger_s or 0.0,
        )
        silence = Sound.of(gateway.served.media["audio"])
        form: Format = SpeechBytes(body.response_format, is_stream=body.is_stream, silence=silence)
        if body.stream_format == "sse":
            form = SpeechEvents(body.response_format, silence=silence)
        limit_s = caps.limit_s(body.timeout_s, gateway.settings)
        return Answer(gateway, Question(route=SPEECH, parts=[asked], limit_s=limit_s), form)

    return router
