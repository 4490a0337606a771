"""`POST /v1/images/generations`, `/v1/images/edits` and `/v1/images/variations`."""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

from fastapi import APIRouter, Request, Response

from gateway.http.bodies import body_schema, read_object
from gateway.images.answers import ImageEvents, ImagesDocument
from gateway.images.request import EditRequest, ImageRequest, VariationRequest, check_varies
from gateway.images.uploads import open_edit
from gateway.media.file_links import FileLinks
from gateway.media.intake import MediaIntake
from gateway.media.sources import MediaSource
from gateway.openai.generation_fields import parse
from gateway.requests.choices import split
from gateway.requests.parsed_request import ParsedRequest, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord

GENERATIONS: Final = "/v1/images/generations"
EDITS: Final = "/v1/images/edits"
VARIATIONS: Final = "/v1/images/variations"
_Kind: TypeAlias = Literal["image_generation", "image_edit"]


def image_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])
    intake = MediaIntake(gateway)

    @router.post(GENERATIONS, summary="Draw images from a text", openapi_extra=body_schema(ImageRequest))
    async def generations(request: Request) -> Response:
        body = parse(ImageRequest, await read_object(request), gateway.served)
        requests = _requests(gateway, request, body)
        return _answer(gateway, request, body, requests, GENERATIONS, "image_generation")

    async def edited(request: Request, kind: type[EditRequest | VariationRequest], route: str) -> Response:
        async with open_edit(request, intake.form_limits) as found:
            body = parse(kind, found.fields, gateway.served)
            if isinstance(body, VariationRequest):
                check_varies(gateway.served)
            requests = await intake.attach(_requests(gateway, request, body), found.images)
        return _answer(gateway, request, body, requests, route, "image_edit", found.images)

    @router.post(
        EDITS, summary="Draw images from images and a text", openapi_extra=_body_with_images(EditRequest)
    )
    async def edits(request: Request) -> Response:
        return await edited(request, EditRequest, EDITS)

    @router.post(
        VARIATIONS, summary="Draw variations of an image", openapi_extra=_body_with_images(VariationRequest)
    )
    async def variations(request: Request) -> Response:
        return await edited(request, VariationRequest, VARIATIONS)

    return router


def _requests(gateway: Gateway, http: Request, body: ImageRequest) -> list[ParsedRequest]:
    """One request for each image."""
    parsed = parsed_request(
        http,
        body,
        gateway.settings,
        id_prefix="img",
        model=body.model or gateway.served.name,
        inputs=body.inputs,
        params=body.params(gateway.served, gateway.settings),
    )
    return split(parsed, [body.inputs], body.answers)


def _answer(
    gateway: Gateway,
    http: Request,
    body: ImageRequest,
    requests: Sequence[ParsedRequest],
    route: str,
    kind: _Kind,
    images: Sequence[MediaSource] = (),
) -> AnswerResponse:
    links = FileLinks.of(gateway, http) if body.gives_addresses else None

    def make_format(recorded: SubmissionRecord) -> AnswerFormat:
        if body.stream:
            return ImageEvents(kind, recorded.created_s, len(requests))
        return ImagesDocument(recorded.created_s, len(requests), links)

    group = RequestGroup(
        route=route,
        requests=requests,
        n=len(requests),
        is_stream=bool(body.stream),
        media_places=[one.where for one in images],
        option_fields=body.option_fields,
    )
    return AnswerResponse(gateway, group, make_format)


def _body_with_images(kind: type[ImageRequest]) -> dict[str, Any]:
    """The OpenAPI description of a body with images: a form with files, or JSON with references."""
    described = body_schema(kind)
    [(_, content)] = described["requestBody"]["content"].items()
    schema = content["schema"]
    file = {"type": "string", "format": "binary"}
    reference = {
        "type": "object",
        "properties": {"image_url": {"type": "string"}, "file_id": {"type": "string"}},
        "additionalProperties": False,
    }
    form = {"image": {"anyOf": [file, {"type": "array", "items": file}]}}
    json = {"images": {"type": "array", "items": reference, "minItems": 1}}

    def with_images(images: dict[str, Any]) -> dict[str, Any]:
        required = [*schema.get("required", ()), *images]
        return {"schema": {**schema, "required": required, "properties": {**schema["properties"], **images}}}

    content_types = {"multipart/form-data": with_images(form), "application/json": with_images(json)}
    return {"requestBody": {"required": True, "content": content_types}}
