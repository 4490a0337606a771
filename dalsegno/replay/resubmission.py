"""Submission of requests to a running deployment over its log, for `--fork-at` and `--load`; their answers.

It publishes as any service does, with a client's credentials, and needs no gateway. One reader follows all
answers; `dalsegno.history.reply` folds them.
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from dalsegno.bundle import manifest
from dalsegno.history.reply import Reply
from shared.errors import CapacityError, ClientError, DalSegnoError
from shared.events import RequestSubmitted, WorkerJoined, encode
from shared.log.port import Log, WrongLastSequenceError
from shared.subjects import Address, Subjects

WRITER: Final = "dalsegno-replay"
_ACCEPT_S: Final = 10.0
"""Seconds that the log may take to ack a request."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and its delay after the first one."""

    event: RequestSubmitted
    after_s: float = 0.0


async def model_served(log: Log, subjects: Subjects) -> str:
    """Return the model of the deployment that writes this log.

    Raises:
        CapacityError: no worker has been ready there yet.
    """
    model = None
    async with aclosing(log.history([subjects.worker_any()])) as records:
        async for record in records:
            event = manifest.event_of(record, subjects)
            if isinstance(event, WorkerJoined):
                model = event.model
    if model is None:
        raise CapacityError(f"no worker has been ready yet under the prefix {subjects.prefix!r}")
    return model


async def submit(log: Log, subjects: Subjects, event: RequestSubmitted) -> int:
    """Store one request; return its position.

    Raises:
        ClientError: its id is taken.
        CapacityError: the log does not answer.
    """
    stamped = msgspec.structs.replace(event, id=f"{event.request_id}.submitted", writer=WRITER)
    try:
        async with asyncio.timeout(_ACCEPT_S):
            return await log.publish(
                subjects.request(str(event.request_id)), encode(stamped), expected_last_seq=0
            )
    except WrongLastSequenceError as error:
        raise ClientError(f"request_id {event.request_id!r} is taken; choose another") from error
    except TimeoutError as error:
        raise CapacityError(f"the log did not answer within {_ACCEPT_S:g} s") from error


async def answers(log: Log, subjects: Subjects, submissions: Sequence[Submission]) -> dict[str, Reply]:
    """Submit requests at their times and wait for all answers; return them by request id, in that order.

    Raises:
        ClientError: an id is taken.
        CapacityError: the log does not answer.
    """
    origin = f"replay-{secrets.token_hex(4)}"
    replies = {str(one.event.request_id): Reply() for one in submissions}
    term = await log.last(subjects.epoch)
    if term is not None and (opened := manifest.event_of(term, subjects)) is not None:
        address = Address(kind="conductor")
        for reply in replies.values():
            reply.take(address, opened, term.seq, term.time_ns)
    start = (await log.state()).last_seq + 1
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_follow(log, subjects, origin, start, replies))
            began = asyncio.get_running_loop().time()
            for one in submissions:
                await asyncio.sleep(max(began + one.after_s - asyncio.get_running_loop().time(), 0.0))
                await submit(log, subjects, msgspec.structs.replace(one.event, origin=origin))
    except ExceptionGroup as group:
        raise error_in(group) from None
    return replies


def error_in(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of ours in a group, at any depth; the whole group if there is none."""
    found: Exception | None = group.subgroup(DalSegnoError)
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found or group


async def _follow(log: Log, subjects: Subjects, origin: str, start: int, replies: dict[str, Reply]) -> None:
    """Fold stored records until all requests have ended."""
    wanted = [
        subjects.request("*"),
        subjects.walk("*"),
        subjects.output(origin, "*", "*"),
        subjects.epoch,
    ]
    missing = set(replies)
    async with aclosing(log.read(wanted, start)) as records:
        async for record in records:
            address, event = subjects.parse(record.subject), manifest.event_of(record, subjects)
            if address is None or event is None:
                continue
            concerned = replies if address.request_id is None else {address.request_id} & missing
            for request_id in list(concerned):
                replies[request_id].take(address, event, record.seq, record.time_ns)
                if replies[request_id].outcome != "open":
                    missing.discard(request_id)
            if not missing:
                return
