"""Reading without a JetStream consumer: record after record, by `STREAM.MSG.GET`.

A stream has a limited number of consumers, and a key that may read the log can use all of them up. The roles
of a deployment must be able to start nevertheless: a conductor that cannot read cannot take over. So a reader
that gets no consumer reads by single requests, some 20,000 records a second, and asks for a consumer again
every few seconds.

Each request names a sequence number, and the reader drops records of other subjects: a search by subject
would have to wait for each answer before the next request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from shared.log.nats.cursor import Cursor
from shared.log.nats.subject_filter import matcher
from shared.log.port import LogUnavailableError, StoredRecord

POLL_EVERY_S: Final = 0.02
"""The pause at the log's end."""
STINT_S: Final = 2.0
"""The time after which the reader asks for a consumer again."""
_AT_ONCE: Final = 128
"""Requests in flight. The server drops all of its queued requests when it has 10,000."""


async def poll(
    cursor: Cursor,
    subjects: Sequence[str],
    get: Callable[[int], Awaitable[StoredRecord | None]],
    last_seq: Callable[[], Awaitable[int]],
) -> None:
    """Feed `cursor` with the records on `subjects` for a while, or until it has all; then it has a fault.

    Args:
        cursor: the reader's position and queue.
        subjects: the subjects that it reads.
        get: returns the record at a sequence number; None if the log has deleted it.
        last_seq: returns the position at which the log ends.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    matches = matcher(subjects)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STINT_S

    def goes_on() -> bool:
        return not cursor.finished and cursor.fault is None and loop.time() < until_s

    while goes_on():
        end = await last_seq()
        if cursor.end_seq is not None:
            end = min(end, cursor.end_seq)
        while goes_on() and cursor.position < end and not cursor.is_crowded:
            wanted = range(cursor.position + 1, min(cursor.position + _AT_ONCE, end) + 1)
            for seq, record in zip(wanted, await _all(get, wanted), strict=True):
                is_ours = record is not None and matches(record.subject.encode())
                cursor.polled(seq, record if is_ours else None, end)
        if not cursor.finished:
            await asyncio.sleep(POLL_EVERY_S)
    if not cursor.finished and cursor.fault is None:
        cursor.fail("a consumer may be free again")


async def _all(
    get: Callable[[int], Awaitable[StoredRecord | None]], wanted: Iterable[int]
) -> list[StoredRecord | None]:
    async def one(seq: int) -> StoredRecord | None:
        return await get(seq)

    try:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one(seq)) for seq in wanted]
    except* LogUnavailableError as group:
        failures = group.exceptions
    else:
        return [task.result() for task in found]
    raise LogUnavailableError(str(failures[0]))
