"""`GET /policy`: what the server is. `POST /policy`: an observation in, actions out, both in msgpack.

The WebSocket at `/` sends its messages here (`gateway.policy.session`). There are no such routes for a model
without actions.
"""

import time
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import Response as PlainResponse

from gateway.media.intake import MediaIntake
from gateway.media.sources import InlineSource
from gateway.policy import packing, session
from gateway.policy.answers import ACTION, MEDIA_TYPE, ActionsDocument
from gateway.requests.parsed_request import DeliveryFields, parsed_request
from gateway.requests.response import AnswerFormat, AnswerResponse, RequestGroup
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from shared.events import Inputs, Params

_BINARY: Final = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_BODY: Final[dict[str, Any]] = {"requestBody": {"required": True, "content": _BINARY}}


def serves_actions(gateway: Gateway) -> bool:
    """True if the model is a policy: it makes actions of arrays."""
    return ACTION in gateway.served.outputs and "tensor" in gateway.served.modalities


def policy_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway; none for a model without actions."""
    router = APIRouter(tags=["policy"])
    if not serves_actions(gateway):
        return router
    intake = MediaIntake(gateway)

    @router.get(session.PATH, summary="Describe the policy")
    async def describe() -> PlainResponse:
        facts = {"server": "dalsegno", "model": gateway.served.name, "family": gateway.served.family}
        return PlainResponse(packing.pack(facts), media_type=MEDIA_TYPE)

    @router.post(session.PATH, summary="Return actions for an observation", openapi_extra=_BODY)
    async def act(request: Request) -> Response:
        begun_s = time.monotonic()
        seen = packing.unpack(await request.body())
        inputs = Inputs(
            text=seen.prompt, chat=False, input_modalities=["text", "tensor"], output_modalities=[ACTION]
        )
        parsed = parsed_request(
            request,
            DeliveryFields(),
            gateway.settings,
            id_prefix="act",
            model=gateway.served.name,
            inputs=inputs,
            params=Params(),
        )
        file = InlineSource(where="observation", modality="tensor", data=packing.file_of(seen.arrays))
        requests = await intake.attach([parsed], [file])

        def make_format(recorded: SubmissionRecord) -> AnswerFormat:
            return ActionsDocument(
                parsed.request_id, begun_s, getattr(request.state, session.PREVIOUS_MS, None)
            )

        group = RequestGroup(route=session.PATH, requests=requests, media_places=[file.where])
        return AnswerResponse(gateway, group, make_format)

    router.add_websocket_route("/", session.serve)
    return router
