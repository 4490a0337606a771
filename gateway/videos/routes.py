"""OpenAI's `/v1/videos`, whose jobs are requests on the log, and `/v1/videos/generations`, which waits.

    POST   /v1/videos               a new job
    GET    /v1/videos               the jobs of this API key, the newest first
    GET    /v1/videos/{id}          one job
    GET    /v1/videos/{id}/content  its video, or pictures of it
    DELETE /v1/videos/{id}          cancels and deletes it
    POST   /v1/videos/generations   the video itself, as M* and mini-sglang answer

A job needs no reader: it runs until it is complete, fails, or is deleted. It belongs to the API key that
asked for it: for other keys it does not exist.
"""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway import errors
from gateway.client_key import key_name
from gateway.errors import ErrorResponse, InvalidParamError
from gateway.http.bodies import body_schema, read_object
from gateway.http.pages import page_document
from gateway.media.file_links import FileLinks
from gateway.media.intake import MediaIntake
from gateway.openai.generation_fields import GenerationFields, check_output, parse
from gateway.requests.acceptance import submit_without_reader
from gateway.requests.choices import split
from gateway.requests.parsed_request import ParsedRequest, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.videos.answers import VideosDocument
from gateway.videos.content import content_of
from gateway.videos.job_store import Order, VideoJobs
from gateway.videos.jobs import VideoJob
from gateway.videos.request import VIDEO, GenerationRequest, VideoRequest, with_number
from gateway.videos.uploads import REFERENCE, VideoBody, generation_media, open_video
from shared.errors import ClientError
from shared.events import Failure
from shared.validation_errors import described

VIDEOS: Final = "/v1/videos"
GENERATIONS: Final = "/v1/videos/generations"
_SERVER_ERRORS: Final = 500
"""The least HTTP status of an error that is not the client's."""
_MOST_LISTED: Final = 100
_ID_PREFIX: Final = "video"


class NoVideoToVideoError(ClientError):
    """A route of OpenAI's that makes a video from another one."""

    code = "not_supported"

    def __init__(self, path: str) -> None:
        super().__init__(
            f"POST {path[:200]} makes a video from another one, which no model here does; expected POST "
            f"{VIDEOS}, with an {REFERENCE} to begin with an image"
        )


def video_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])
    _add_generations(router, gateway)
    _add_refusals(router)
    _add_new_jobs(router, gateway)
    _add_jobs(router, gateway)
    return router


def _add_new_jobs(router: APIRouter, gateway: Gateway) -> None:
    intake = MediaIntake(gateway)

    @router.post(VIDEOS, summary="Ask for a video", openapi_extra=_job_body(), response_model=None)
    async def create(request: Request) -> dict[str, Any] | Response:
        async with open_video(request, intake.form_limits) as found:
            body = parse(VideoRequest, with_number(found.fields, "seconds"), gateway.served)
            [parsed] = await intake.attach([_parsed(gateway, request, body)], found.media)
        await submit_without_reader(gateway, request, parsed)
        job = await _jobs_of(gateway, request).one(parsed.request_id)
        if job.failure is not None and job.failure.status < _SERVER_ERRORS:
            return _refused(job.failure, found, body.option_fields)
        return job.document(gateway.log_max_age_s)


def _add_jobs(router: APIRouter, gateway: Gateway) -> None:
    def document(job: VideoJob) -> dict[str, Any]:
        return job.document(gateway.log_max_age_s)

    @router.get(VIDEOS, summary="The video jobs")
    async def jobs(request: Request, limit: int = 20, after: str = "", order: str = "desc") -> dict[str, Any]:
        page, has_more = await _jobs_of(gateway, request).page(
            limit=_limit(limit), after=after, order=_order(order)
        )
        return page_document([document(job) for job in page], has_more=has_more)

    @router.get(f"{VIDEOS}/{{video_id}}", summary="One video job")
    async def job(request: Request, video_id: str) -> dict[str, Any]:
        return document(await _jobs_of(gateway, request).one(video_id))

    @router.get(f"{VIDEOS}/{{video_id}}/content", summary="The video of a job, or pictures of it")
    async def content(request: Request, video_id: str, variant: str = VIDEO) -> Response:
        return await content_of(gateway, await _jobs_of(gateway, request).one(video_id), variant)

    @router.delete(f"{VIDEOS}/{{video_id}}", summary="Cancel and delete a video job")
    async def delete(request: Request, video_id: str) -> dict[str, Any]:
        jobs = _jobs_of(gateway, request)
        found = await jobs.one(video_id)
        await jobs.delete(found)
        return {"id": found.id, "object": "video.deleted", "deleted": True}


def _add_generations(router: APIRouter, gateway: Gateway) -> None:
    intake = MediaIntake(gateway)

    @router.post(
        GENERATIONS, summary="Make videos, and wait for them", openapi_extra=body_schema(GenerationRequest)
    )
    async def generations(request: Request) -> Response:
        body = parse(GenerationRequest, await read_object(request), gateway.served)
        media = generation_media(body)
        requests = split(_parsed(gateway, request, body), [body.inputs], body.answers)
        requests = await intake.attach(requests, media)
        form, links = body.response_format or "b64_json", FileLinks.of(gateway, request)

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            return VideosDocument(recorded.created_s, len(requests), form, links, body.fps)

        places = [one.where for one in media]
        group = RequestGroup(
            route=GENERATIONS,
            requests=requests,
            n=len(requests),
            media_places=places,
            option_fields=body.option_fields,
        )
        return AnswerResponse(gateway, group, make_format)


def _add_refusals(router: APIRouter) -> None:
    async def refuse(request: Request) -> Response:
        raise NoVideoToVideoError(request.url.path)

    for path in ("/{video_id}/remix", "/edits", "/extensions", "/characters"):
        router.add_api_route(f"{VIDEOS}{path}", refuse, methods=["POST"], include_in_schema=False)


def _jobs_of(gateway: Gateway, request: Request) -> VideoJobs:
    """The jobs of the request's API key.

    Raises:
        ClientError: the model makes no videos.
    """
    check_output(gateway.served, VIDEO)
    return VideoJobs(gateway, key_name(request.scope))


def _parsed(gateway: Gateway, http: Request, body: GenerationFields) -> ParsedRequest:
    return parsed_request(
        http,
        body,
        gateway.settings,
        id_prefix=_ID_PREFIX,
        model=body.model or gateway.served.name,
        inputs=body.inputs,
        params=body.params(gateway.served, gateway.settings),
    )


def _refused(failure: Failure, body: VideoBody, option_fields: Mapping[str, str]) -> Response:
    """The answer to a job that was refused at once."""
    places = {"files": [one.where for one in body.media]}
    return ErrorResponse(errors.of_failure(failure, places, option_fields))


def _limit(limit: int) -> int:
    if not 1 <= limit <= _MOST_LISTED:
        raise InvalidParamError(
            "limit", f"limit: expected an integer from 1 to {_MOST_LISTED}, found {limit}"
        )
    return limit


def _order(order: str) -> Order:
    match order:
        case "asc" | "desc":
            return order
        case _:
            raise InvalidParamError("order", f"order: expected asc or desc, found {described(order)}")


def _job_body() -> dict[str, Any]:
    """The OpenAPI description of a new job: a form whose reference is a file, or JSON with a reference."""
    described_body = body_schema(VideoRequest)
    [(_, content)] = described_body["requestBody"]["content"].items()
    schema = content["schema"]
    reference = {
        "type": "object",
        "properties": {"image_url": {"type": "string"}, "file_id": {"type": "string"}},
        "additionalProperties": False,
    }
    kinds = {
        "multipart/form-data": {"type": "string", "format": "binary"},
        "application/json": reference,
    }
    return {
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {**schema, "properties": {**schema["properties"], REFERENCE: one}}}
                for kind, one in kinds.items()
            },
        }
    }
