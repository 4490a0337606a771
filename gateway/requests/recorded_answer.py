"""Answers that are on the log, read again; and requests that are cancelled or deleted by their ids."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.requests.readers import cancel_of
from gateway.requests.relay import AnswerItem, Relay
from gateway.requests.service import Gateway
from gateway.requests.status import PartStatus, RecordedRequest, StatusFold, log_timeout
from shared.events import RequestCancel, encode
from shared.ids import RequestId, parse_request_id


async def status_of(gateway: Gateway, request_id: RequestId) -> PartStatus:
    """The status of one request now.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    fold = StatusFold(gateway.subjects, [request_id])
    async with log_timeout():
        await fold.read(gateway.log)
    return fold.parts[request_id]


async def answer_of(gateway: Gateway, part: PartStatus) -> AsyncGenerator[AnswerItem, None]:
    """The answer of a request that has ended: `Failed` if the log has forgotten a part of it.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    relay = Relay(gateway.log, gateway.subjects, part.id)
    relay.output.submission_seq = part.seq
    async with log_timeout():
        relay.reread(max(1, (await gateway.log.state()).first_seq), epoch=0)
        async with aclosing(relay.items()) as items:
            async for item in items:
                yield item


async def recorded_request(gateway: Gateway, request_id: str) -> RecordedRequest:
    """A request with all its parts, as the log has it now.

    Raises:
        ClientError: the id is malformed, or the log holds nothing of the request.
        LogUnavailableError: the log does not answer.
    """
    recorded = RecordedRequest(
        gateway.log, gateway.subjects, parse_request_id(request_id), gateway.follower.recent_ids
    )
    await recorded.read()
    return recorded


async def cancel(gateway: Gateway, recorded: RecordedRequest) -> None:
    """Cancel a request, and wait a little for the conductor's decision."""

    def cancelled(one: str) -> RequestCancel:
        return cancel_of(one, "cancelled over HTTP", gateway.origin, gateway.next_number())

    await recorded.cancel(cancelled)


async def delete(gateway: Gateway, request_id: str) -> None:
    """Cancel a request unless it has ended, and delete its output."""
    event = cancel_of(request_id, "deleted over HTTP", gateway.origin, gateway.next_number(), deletes=True)
    async with log_timeout():
        await gateway.log.publish(gateway.subjects.control(request_id), encode(event))
