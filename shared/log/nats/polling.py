"""Reading without a JetStream consumer: record after record, by `STREAM.MSG.GET`.

A stream has a limited number of consumers, and a key that may read the log can use all of them up. The roles
of a deployment must be able to start nevertheless: a conductor that cannot read cannot take over. So a reader
that gets no consumer reads by single requests, some 20,000 records a second, and asks for a consumer again
every few seconds.

Each request names a sequence number, and the reader drops records of other subjects: a search by subject
would have to wait for each answer before the next request. Only a part of the log that has none of the
reader's records is skipped by such a search.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from shared.log.nats.cursor import Cursor
from shared.log.nats.subject_filter import matcher
from shared.log.port import LogState, LogUnavailableError, StoredRecord

_Result = TypeVar("_Result")

POLL_EVERY_S: Final = 0.02
"""The pause at the log's end."""
STINT_S: Final = 2.0
"""The time after which the reader asks for a consumer again."""
_AT_ONCE: Final = 128
"""Requests in flight. The server drops all of its queued requests when it has 10,000."""


class Source(NamedTuple):
    """The requests that a reader makes of the log.

    Attributes:
        get: returns the record at a sequence number; None if the log has deleted it.
        next_on: returns the first record on a subject after a sequence number, if there is one.
        state: returns the state of the log.
    """

    get: Callable[[int], Coroutine[Any, Any, StoredRecord | None]]
    next_on: Callable[[str, int], Coroutine[Any, Any, StoredRecord | None]]
    state: Callable[[], Awaitable[LogState]]


async def poll(cursor: Cursor, subjects: Sequence[str], log: Source) -> None:
    """Feed `cursor` with the records on `subjects` for a while, or until it has all; then it has a fault.

    Args:
        cursor: the reader's position and queue.
        subjects: the subjects that it reads.
        log: the log.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    matches = matcher(subjects)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STINT_S

    def goes_on() -> bool:
        return not cursor.finished and cursor.fault is None and loop.time() < until_s

    while goes_on():
        state, may_skip = await log.state(), True
        end = state.last_seq if cursor.end_seq is None else min(state.last_seq, cursor.end_seq)
        _skip(cursor, state.first_seq - 1, end)  # these records have expired
        while goes_on() and cursor.position < end and not cursor.is_crowded:
            if may_skip and end - cursor.position > _AT_ONCE:
                after = cursor.position
                found = await _all(log.next_on(subject, after) for subject in subjects)
                _skip(cursor, min((one.seq - 1 for one in found if one is not None), default=end), end)
            wanted = range(cursor.position + 1, min(cursor.position + _AT_ONCE, end) + 1)
            may_skip = True
            for seq, record in zip(wanted, await _all(map(log.get, wanted)), strict=True):
                is_ours = record is not None and matches(record.subject.encode())
                may_skip = may_skip and not is_ours
                cursor.polled(seq, record if is_ours else None, end)
        if not cursor.finished:
            await asyncio.sleep(POLL_EVERY_S)
    if not cursor.finished and cursor.fault is None:
        cursor.fail("a consumer may be free again")


def _skip(cursor: Cursor, seq: int, end: int) -> None:
    """Move the cursor to `seq`, but not beyond `end`, and not back: no record up to there is for it."""
    if cursor.position < min(seq, end):
        cursor.polled(min(seq, end), None, end)


async def _all(requests: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    try:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one) for one in requests]
    except* LogUnavailableError as group:
        failures = group.exceptions
    else:
        return [task.result() for task in found]
    raise LogUnavailableError(str(failures[0]))
