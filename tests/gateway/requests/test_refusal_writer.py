"""One event at a time, in order, each stored once, whatever happens to the log."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from gateway.requests import refusal_writer
from gateway.requests.refusal_writer import RefusalWriter
from gateway.requests.refusals import sample
from shared.events import RequestsRefused, encode
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import Log, LogDeniedError, LogFullError
from shared.subject_rules import read_event
from shared.subjects import Subjects

SUBJECTS = Subjects()


class Place:
    """A log in memory that a writer opens, and that may fail."""

    def __init__(self) -> None:
        self.store = MemoryStore(SUBJECTS)
        self.failure: Exception | None = None
        self.opened = 0

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Log, None]:
        self.opened += 1
        if self.failure is not None:
            raise self.failure
        log = MemoryLog(self.store)
        try:
            yield log
        finally:
            await log.close()

    @property
    def events(self) -> list[RequestsRefused]:
        found = [read_event(record, SUBJECTS)[1] for record in self.store.records]
        assert all(isinstance(one, RequestsRefused) for one in found)
        return found  # type: ignore[return-value] # see the line above

    async def until_stored(self, count: int) -> None:
        async with aclosing(MemoryLog(self.store).read([SUBJECTS.refused("*")], count)) as records:
            await anext(records)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def writer() -> RefusalWriter:
    return RefusalWriter(SUBJECTS, "g-1")


@asynccontextmanager
async def running(
    writer: RefusalWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[None]]:
    monkeypatch.setattr(refusal_writer, "DELAY_S", 0.0)
    monkeypatch.setattr(refusal_writer, "INTERVAL_S", 0.01)
    task = asyncio.create_task(writer.run(place.open))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def refuse(writer: RefusalWriter, count: int = 1, code: str = "a") -> None:
    for _ in range(count):
        writer.add(sample(code, 400, "wrong", time_ns=1))


def total(events: list[RequestsRefused]) -> int:
    return sum(one.count for event in events for one in event.counts)


async def test_refusals_are_stored_under_the_gateways_name(
    writer: RefusalWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(writer, place, monkeypatch):
        refuse(writer, 10_000)
        await place.until_stored(1)
        refuse(writer, 2, "b")
        await place.until_stored(2)

    assert [record.subject for record in place.store.records] == ["ds.refused.g-1"] * 2
    assert [one.id for one in place.events] == ["g-1.refused.1", "g-1.refused.2"]
    assert [total([one]) for one in place.events] == [10_000, 2]


async def test_nothing_is_opened_or_stored_while_there_is_nothing_to_say(
    writer: RefusalWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(writer, place, monkeypatch):
        refuse(writer)
        await place.until_stored(1)
        for _ in range(100):
            await asyncio.sleep(0)
    assert await writer.write(place.open)
    assert (len(place.store.records), place.opened) == (1, 1)


@pytest.mark.parametrize(
    "failure", [LogFullError("no room"), LogDeniedError("denied"), LogFullError("another reason")]
)
async def test_what_cannot_be_stored_is_counted_on_and_stored_later(
    writer: RefusalWriter, place: Place, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    place.failure = failure
    refuse(writer, 3)
    assert not await writer.write(place.open)
    refuse(writer, 4)
    assert not await writer.write(place.open)
    place.failure = None
    await writer.finish(place.open, 30)

    assert [total([one]) for one in place.events] == [3, 4]
    assert len(caplog.records) == 1  # once per reason
    assert str(failure) in caplog.text


async def test_an_event_whose_ack_is_unknown_is_sent_again_as_it_was(
    writer: RefusalWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_writer, "WRITE_S", 0.0)
    place.store.stall()
    refuse(writer, 3)
    assert not await writer.write(place.open)
    refuse(writer, 5)
    place.store.unstall()
    monkeypatch.setattr(refusal_writer, "WRITE_S", 30.0)
    assert await writer.write(place.open)

    [event] = place.events
    assert (event.id, total([event])) == ("g-1.refused.1", 3)
    assert await writer.write(place.open)
    assert [one.id for one in place.events] == ["g-1.refused.1", "g-1.refused.2"]


async def test_the_last_refusals_are_stored_at_the_end(writer: RefusalWriter, place: Place) -> None:
    for number in range(200):  # more kinds than one event has
        refuse(writer, 2, f"code-{number}")
    await writer.finish(place.open, 30)

    assert total(place.events) == 400
    assert len(place.events) == 4


async def test_the_end_does_not_wait_for_a_log_that_is_away(writer: RefusalWriter, place: Place) -> None:
    place.store.stop()
    refuse(writer)
    await writer.finish(place.open, 0.01)
    assert place.events == []


async def test_a_killed_gateway_loses_what_it_counted_since_its_last_event(
    writer: RefusalWriter, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(writer, place, monkeypatch) as task:
        refuse(writer, 7)
        await place.until_stored(1)
        refuse(writer, 5)
        task.cancel()  # and no end in order
    assert total(place.events) == 7


def test_the_event_survives_its_encoding(writer: RefusalWriter) -> None:
    event = RequestsRefused(id="1", writer="g-1", since_ns=1, counts=[])
    assert b"requests.refused.v1" in encode(event)
