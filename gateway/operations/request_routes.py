"""`/v1/requests/{id}`: a request's status, timeline and cancel, for every client of the deployment."""

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Response

from gateway.requests import recorded_answer
from gateway.requests.recorded_answer import recorded_request
from gateway.requests.service import Gateway
from gateway.requests.status import ENDED, RecordedRequest, RequestEndedError
from gateway.requests.timeline import timeline_of

_PART: Final[dict[str, Any]] = {
    "id": {"type": "string"},
    "status": {
        "type": "string",
        "enum": ["waiting", "running", "cancelling", "finished", "cancelled", "failed", "rejected"],
    },
    "created": {"type": "integer"},
    "ended": {"type": ["integer", "null"]},
    "finish_reason": {"type": ["string", "null"]},
    "usage": {
        "type": ["object", "null"],
        "properties": {
            **{name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    },
    "error": {
        "type": ["object", "null"],
        "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
    },
}
_REQUEST: Final[dict[str, Any]] = {
    "type": "object",
    "required": [*_PART, "object", "model", "correlation"],
    "properties": {
        **_PART,
        "object": {"const": "request"},
        "model": {"type": ["string", "null"]},
        "correlation": {"type": ["string", "null"]},
        "parts": {"type": "array", "items": {"type": "object", "properties": _PART}},
    },
}
_RESPONSE: Final[dict[str, Any]] = {"content": {"application/json": {"schema": _REQUEST}}}


def request_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(prefix="/v1/requests", tags=["requests"])

    @router.get(
        "/{request_id}",
        summary="The status of a request",
        responses={200: {"description": "The status by the log", **_RESPONSE}},
        response_class=Response,
    )
    async def status(request_id: str) -> Response:
        return _response(await recorded_request(gateway, request_id), 200)

    @router.delete(
        "/{request_id}",
        summary="Cancel a request",
        responses={
            200: {"description": "The request is cancelled", **_RESPONSE},
            202: {"description": "The cancel is stored, and not decided yet; ask again later", **_RESPONSE},
        },
        response_class=Response,
    )
    async def cancel(request_id: str) -> Response:
        recorded = await recorded_request(gateway, request_id)
        await recorded_answer.cancel(gateway, recorded)
        if recorded.status in ENDED and recorded.status != "cancelled":
            raise RequestEndedError(request_id, recorded.status)
        return _response(recorded, 200 if recorded.status == "cancelled" else 202)

    @router.get("/{request_id}/timeline", summary="When and where a request was computed")
    async def timeline(request_id: str) -> dict[str, Any]:
        recorded = await recorded_request(gateway, request_id)  # it knows why there is none
        return (await timeline_of(gateway, recorded.id)).document(request_id)

    return router


def _response(recorded: RecordedRequest, status: int) -> Response:
    return Response(msgspec.json.encode(recorded.document()), status, media_type="application/json")
