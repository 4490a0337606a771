"""The records that a request's replay needs: those of all its parts, of workers and of epochs."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import Any, Final

import msgspec

from dalsegno.history import seals
from dalsegno.history.damage import Damage, described
from dalsegno.history.summary import iso
from shared.errors import ClientError
from shared.events import MalformedEventError, RequestSubmitted, decode
from shared.ids import parse_request_id
from shared.log.port import Log, LogState, StoredRecord
from shared.subjects import Subjects

_MANY: Final = 16
"""From this many parts on the whole log is read: a filter per subject costs the server more."""


class RequestRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a log that belongs to one request.

    Attributes:
        requests: its id, and those of the other parts if it asked for several answers.
        log: the state of the log at the time of reading.
        damaged: those of the requests of which records may be missing, with the reason.
        seals: the seals that cover the records.
        configs: the known configurations of that log by digest; secrets are masked.
    """

    request_id: str
    requests: list[str]
    subjects: Subjects
    records: list[StoredRecord]
    log: LogState
    damaged: dict[str, str] = {}
    seals: list[StoredRecord] = []
    configs: dict[str, Any] = {}


async def collect(log: Log, subjects: Subjects, request_id: str) -> RequestRecords:
    """Read the records of a request.

    Raises:
        ClientError: it cannot be replayed from this log; the message says why.
    """
    parse_request_id(request_id)
    state = await log.state()
    requests = await _parts(log, subjects, request_id)
    async with aclosing(log.history(_wanted(subjects, requests))) as history:
        records = [record async for record in history if _concerns(record, subjects, requests)]
    while records and _of(records[-1], subjects) is None:
        records.pop()  # later records of workers and epochs
    _check(request_id, records, subjects, state)
    damage = Damage(state.missing, subjects)
    for record in records:
        damage.take(record)
    return RequestRecords(
        request_id=request_id,
        requests=requests,
        subjects=subjects,
        records=records,
        log=state,
        damaged=damage.of(requests),
        seals=await seals.covering(log, subjects, records, requests),
    )


async def records_between(
    log: Log, subjects: Subjects, requests: Collection[str], first_seq: int, last_seq: int
) -> AsyncGenerator[StoredRecord, None]:
    """Iterate over the records of requests from position `first_seq` to `last_seq`, in log order.

    A few requests are read by their subjects; of many, the range is read whole. Records of workers and epochs
    are left out.
    """
    wanted = subjects.logged()
    if len(requests) <= _MANY:
        wanted = [subject for one in requests for subject in subjects.all_of(one)]
    if not requests:
        return
    async with aclosing(log.history(wanted, first_seq, last_seq)) as history:
        async for record in history:
            if _of(record, subjects) in requests:
                yield record


def _wanted(subjects: Subjects, requests: list[str]) -> list[str]:
    if len(requests) > _MANY:
        return subjects.logged()
    return list({subject: None for one in requests for subject in subjects.replayed(one)})


def _concerns(record: StoredRecord, subjects: Subjects, requests: list[str]) -> bool:
    address = subjects.parse(record.subject)
    return address is not None and (address.is_membership or address.request_id in requests)


async def _parts(log: Log, subjects: Subjects, request_id: str) -> list[str]:
    """Return the ids of all parts of a request; of one without parts, or not in the log, its own id."""
    async with aclosing(log.history([subjects.request(request_id)])) as history:
        submission = await _first(history)
    if submission is None or submission.parts == 1 or submission.parent not in (None, request_id):
        return [request_id]
    return part_ids(request_id, submission.parts)


def part_ids(parent: str, parts: int) -> list[str]:
    """Return the ids of the parts of a request; the first part has the request's own."""
    return [parent, *(f"{parent}-{number}" for number in range(1, parts))]


async def _first(records: AsyncIterator[StoredRecord]) -> RequestSubmitted | None:
    async for record in records:
        try:
            event = decode(record.data, "request")
        except MalformedEventError:
            continue
        assert isinstance(event, RequestSubmitted), "the only event type on this subject"
        return event
    return None


def _of(record: StoredRecord, subjects: Subjects) -> str | None:
    address = subjects.parse(record.subject)
    return address.request_id if address is not None else None


def _check(request_id: str, records: list[StoredRecord], subjects: Subjects, state: LogState) -> None:
    own = [record for record in records if _of(record, subjects) == request_id]
    lost = f"; the log is damaged: {described(state.missing)}" if state.missing else ""
    if any(record.subject == subjects.request(request_id) for record in own):
        return
    if own:
        raise ClientError(
            f"request {request_id!r} cannot be replayed: its submission has expired; the log begins with "
            f"record {state.first_seq}, and the oldest that is left of the request is record {own[0].seq}, "
            f"stored {iso(own[0].time_ns)}{lost}"
        )
    gone = f", and records before {state.first_seq} have expired" if state.first_seq > 1 else ""
    raise ClientError(
        f"the log holds no submission of request {request_id!r}{gone}{lost}; `dalsegno log` lists what it has"
    )
