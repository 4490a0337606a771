"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway.http.bodies import body_schema
from gateway.media.intake import MediaIntake
from gateway.requests import resume
from gateway.requests.parsed_request import ParsedRequest, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.transcriptions.answers import TranscriptEvents, TranscriptFile
from gateway.transcriptions.request import TranscriptionRequest, TranslationRequest, parse
from gateway.transcriptions.uploads import FILE, open_speech

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"


def transcription_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])
    intake = MediaIntake(gateway)

    async def heard(request: Request, kind: type[TranslationRequest], route: str) -> Response:
        async with open_speech(request, intake.form_limits) as found:
            body = parse(kind, found.fields, gateway.served)
            [parsed] = await intake.attach([_parsed(gateway, request, body)], found.media)
        return _answer(gateway, request, body, parsed, route)

    @router.post(
        TRANSCRIPTIONS,
        summary="Transcribe speech",
        openapi_extra=_form(TranscriptionRequest),
        response_model=None,
    )
    async def transcriptions(request: Request) -> Response:
        return await heard(request, TranscriptionRequest, TRANSCRIPTIONS)

    @router.post(
        TRANSLATIONS,
        summary="Translate speech into English text",
        openapi_extra=_form(TranslationRequest),
        response_model=None,
    )
    async def translations(request: Request) -> Response:
        return await heard(request, TranslationRequest, TRANSLATIONS)

    return router


def _parsed(gateway: Gateway, http: Request, body: TranslationRequest) -> ParsedRequest:
    return parsed_request(
        http,
        body,
        gateway.settings,
        id_prefix="transcript",
        model=body.model,
        inputs=body.inputs,
        params=body.params(gateway.served, gateway.settings),
    )


def _answer(
    gateway: Gateway, http: Request, body: TranslationRequest, parsed: ParsedRequest, route: str
) -> AnswerResponse:
    answer_format: AnswerFormat
    if isinstance(body, TranscriptionRequest) and body.stream:
        position = resume.requested_position(http, 1, is_stream=True, id_is_chosen=parsed.id_is_chosen)
        parsed = replace(parsed, is_resumed=position.has_any(0))
        answer_format = TranscriptEvents(position)
    else:
        lists = getattr(body, "timestamp_granularities", None) or ["segment"]
        answer_format = TranscriptFile(
            body.response_format, body.task, with_segments="segment" in lists, with_words="word" in lists
        )
    group = RequestGroup(
        route=route,
        requests=[parsed],
        is_stream=isinstance(body, TranscriptionRequest) and bool(body.stream),
        media_places=[FILE],
        option_fields=body.option_fields,
    )
    return AnswerResponse(gateway, group, lambda _: answer_format)


def _form(kind: type[TranslationRequest]) -> dict[str, Any]:
    """The OpenAPI description of a form with an audio file."""
    described = body_schema(kind)
    [(_, content)] = described["requestBody"]["content"].items()
    schema = content["schema"]
    file = {"file": {"type": "string", "format": "binary"}}
    form = {
        **schema,
        "required": [FILE, *schema.get("required", ())],
        "properties": {**file, **schema["properties"]},
    }
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
