"""The first moments of a job, so that a request that the model refuses is an error and not a job that fails.

The conductor admits a request or rejects it. A family may look at the request further in the first step of
its plan, on a worker that has the checkpoint. So a job is accepted once its second step is ordered.
"""

import asyncio
from contextlib import aclosing, suppress
from typing import Final

from starlette.requests import Request

from gateway.errors import note_published
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.relay import decode_or_none
from gateway.requests.service import Gateway
from shared.events import (
    NodeReady,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
)

ADMISSION_S: Final = 2.0
"""The time to wait for the conductor; after it the job counts as queued."""
CHECK_S: Final = 2.0
"""The time to wait for the first step, once the request is admitted."""
_ENDS: Final = RequestFinished | RequestFailed | RequestCancelled | RequestRejected


async def wait_until_accepted(gateway: Gateway, request_id: str) -> None:
    """Wait until a job is accepted or has ended, or for as long as clients can be kept waiting."""
    subjects = gateway.subjects
    watched = [subjects.walk(request_id), subjects.ready("*", request_id)]
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(ADMISSION_S) as limit,
            aclosing(gateway.log.read(watched, 1)) as records,
        ):
            async for record in records:
                address = subjects.parse(record.subject)
                event = None if address is None else decode_or_none(record, address)
                if isinstance(event, _ENDS) or (isinstance(event, NodeReady) and event.index > 0):
                    return
                if isinstance(event, RequestAdmitted):
                    limit.reschedule(asyncio.get_running_loop().time() + CHECK_S)


async def submit_without_reader(gateway: Gateway, http: Request, request: ParsedRequest) -> None:
    """Store a request on the log that runs without a client, and wait a little for its acceptance."""
    subscription = await gateway.submit(request, lambda _: None)
    note_published(http.scope)
    subscription.release()  # without a cancel: the job needs no reader
    await wait_until_accepted(gateway, request.request_id)
