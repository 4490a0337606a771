"""`/v1/batches`: OpenAI's route for files of requests, which run when there is room.

POST /v1/batches              a new batch, of a file that was stored with `purpose` `batch`
GET  /v1/batches              the batches of this API key, the newest first
GET  /v1/batches/{id}         one batch
POST /v1/batches/{id}/cancel  cancel it
"""

import time
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.batches.answers import batch_object
from gateway.batches.live import LiveBatches
from gateway.batches.request import BatchRequest, parse
from gateway.batches.state import BatchState
from gateway.batches.store import StoredBatches
from gateway.client_key import key_name
from gateway.http.bodies import body_schema, read_object
from gateway.http.pages import check_page, page_document
from gateway.media.file_objects import NoFileError, digest_of
from gateway.requests.request_ids import request_id_of
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from shared.events import BatchCreated
from shared.media.store import MediaGoneError

BATCHES: Final = "/v1/batches"


def batch_routes(gateway: Gateway, live: LiveBatches, second: SecondLog) -> APIRouter:
    """The routes of one gateway.

    Args:
        gateway: its state.
        live: what it knows of running batches.
        second: its connection for their events.
    """
    router = APIRouter(prefix=BATCHES, tags=["OpenAI"])

    def stored(request: Request) -> StoredBatches:
        return StoredBatches(gateway, second, key_name(request.scope))

    def shown(state: BatchState) -> dict[str, Any]:
        return batch_object(state, live)

    @router.post("", summary="Run a file of requests", openapi_extra=body_schema(BatchRequest))
    async def create(request: Request) -> dict[str, Any]:
        body, window_s = parse(await read_object(request), gateway.log_max_age_s)
        digest, tenant = digest_of(body.input_file_id, "input_file_id"), key_name(request.scope)
        media = gateway.check_open().media
        try:
            await media.keep(digest, tenant=tenant)
        except MediaGoneError as error:
            raise NoFileError(body.input_file_id, "input_file_id") from error
        now_s = int(time.time())
        batch_id = request_id_of(None, "batch")
        event = BatchCreated(
            id=f"{gateway.origin}.{batch_id}.created",
            writer=gateway.origin,
            endpoint=body.endpoint,
            input=digest,
            window=body.completion_window,
            created_s=now_s,
            expires_s=now_s + window_s,
            tenant=tenant,
            metadata=body.metadata or {},
        )
        return shown(await stored(request).create(batch_id, event))

    @router.get("", summary="The batches")
    async def batches(request: Request, limit: int = 20, after: str = "") -> dict[str, Any]:
        check_page(limit, "desc")
        page, has_more = await stored(request).page(limit, after)
        return page_document([shown(one) for one in page], has_more=has_more)

    @router.get("/{batch_id}", summary="One batch")
    async def batch(request: Request, batch_id: str) -> dict[str, Any]:
        return shown(await stored(request).one(batch_id))

    @router.post("/{batch_id}/cancel", summary="Cancel a batch")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        return shown(await stored(request).cancel(batch_id))

    return router
