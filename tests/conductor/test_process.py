"""The conductor's process on a log: claiming, leading, handing over, stepping down."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import msgspec
import pytest

from conductor import process
from conductor.core.cluster import Cluster
from conductor.process import Conductor
from shared.events import (
    AnyEvent,
    EpochOpened,
    Event,
    Inputs,
    NodeReady,
    Params,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.fake import FakeLog, FakeServer
from shared.log.port import LogState
from shared.meters import ConductorMeters
from shared.models import registry
from tests.conductor.script import SUBJECTS, completion, deployment

pytestmark = pytest.mark.timeout(20)
E = TypeVar("E", bound=Event)


@asynccontextmanager
async def conducting(log: FakeLog, name: str = "c1") -> AsyncGenerator[Conductor, None]:
    conductor = Conductor(log, Cluster(registry.graph, SUBJECTS), deployment(), SUBJECTS, name)
    task = asyncio.create_task(conductor.run())
    try:
        yield conductor
    finally:
        task.cancel()
        await asyncio.wait([task])


class Watcher:
    """Reads the log from its beginning until something is there."""

    def __init__(self, server: FakeServer) -> None:
        self.log = FakeLog(server)
        self._records = self.log.read([f"{SUBJECTS.prefix}.>"], 1)
        self.seen: list[AnyEvent] = []

    async def until(self, kind: type[E], which: Callable[[E], bool] = lambda _: True) -> E:
        async for record in self._records:
            address = SUBJECTS.parse(record.subject)
            try:
                event = decode(record.data, address.kind if address else None)
            except ValueError:
                continue
            self.seen.append(event)
            if isinstance(event, kind) and which(event):
                return event
        raise AssertionError("the log ended")


async def say(log: FakeLog, subject: str, event: Event | bytes) -> int:
    return await log.publish(subject, event if isinstance(event, bytes) else encode(event))


async def join(log: FakeLog) -> int:
    event = WorkerJoined(
        id="w0-a", writer="w0", rank=0, model="demo", nodes=["prepare", "llm"], device="cpu", kv_tokens=128
    )
    return await say(log, SUBJECTS.worker(0), event)


async def submit(log: FakeLog, request_id: str = "r1") -> int:
    event = RequestSubmitted(model="demo", inputs=Inputs(text="hi"), params=Params(max_tokens=4))
    return await say(log, SUBJECTS.request(request_id), event)


async def answer(log: FakeLog, watcher: Watcher, orders: int = 2) -> None:
    for _ in range(orders):
        ready = await watcher.until(NodeReady)
        await say(log, SUBJECTS.done(0, str(ready.request_id)), completion(ready))


async def test_a_request_is_conducted_to_its_end() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    async with conducting(FakeLog(server)):
        await join(log)
        await submit(log)
        await answer(log, watcher)
        finished = await watcher.until(RequestFinished)
    assert (finished.writer, finished.epoch) == ("conductor", 1)
    numbers = [event.number for event in watcher.seen if isinstance(event, NodeReady | RequestFinished)]
    assert numbers == sorted(set(numbers))


async def test_what_was_submitted_before_anybody_conducted_is_conducted() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    await join(log)
    await submit(log)
    async with conducting(FakeLog(server)):
        await answer(log, watcher)
        await watcher.until(RequestFinished)


async def test_a_successor_ends_what_its_predecessor_began() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    await join(log)
    async with conducting(FakeLog(server), "c1"):
        await submit(log)
        ready = await watcher.until(NodeReady)
    await say(log, SUBJECTS.done(0, "r1"), completion(ready))
    async with conducting(FakeLog(server), "c2"):
        await answer(log, watcher, orders=1)
        finished = await watcher.until(RequestFinished)
    assert finished.epoch == 2
    assert sum(isinstance(event, RequestAdmitted) for event in watcher.seen) == 1


async def test_of_two_conductors_the_later_leads_and_the_earlier_follows() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    async with conducting(FakeLog(server), "c1") as first:
        await watcher.until(EpochOpened)
        async with conducting(FakeLog(server), "c2") as second:
            await watcher.until(EpochOpened)
            await join(log)
            await submit(log)
            await answer(log, watcher)
            finished = await watcher.until(RequestFinished)
            assert (first.leading, second.leading) == (False, True)
    assert finished.epoch == 2


async def test_a_follower_claims_when_the_leaders_beats_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BEAT_S", 0.01)
    monkeypatch.setattr(process, "LEADER_SILENT_S", 0.05)
    server = FakeServer(SUBJECTS)
    watcher = Watcher(server)
    async with conducting(FakeLog(server), "c1"):
        await watcher.until(EpochOpened)
        async with conducting(FakeLog(server), "c2"):
            await watcher.until(EpochOpened, lambda event: event.conductor == "c2")
        # c2 is gone; c1, deposed, hears nobody and leads again.
        again = await watcher.until(EpochOpened, lambda event: event.conductor == "c1")
    assert again.epoch == 3


def test_an_epoch_the_log_has_forgotten_is_not_opened_again() -> None:
    young = LogState(first_seq=1, last_seq=40, created_ns=0, messages=40, bytes=1)
    old = LogState(first_seq=9, last_seq=40, created_ns=0, messages=32, bytes=1)
    assert process._epoch_after(None, young) == 1
    assert process._epoch_after(None, old) == 41


async def test_junk_where_epochs_are_opened_stops_nobody() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    await say(log, SUBJECTS.epoch, b"junk")
    async with conducting(FakeLog(server)):
        opened = await watcher.until(EpochOpened)
        await join(log)
        await submit(log)
        await answer(log, watcher)
        await watcher.until(RequestFinished)
    assert opened.epoch == 2


async def test_a_malformed_submission_is_rejected_and_the_next_is_served() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    async with conducting(FakeLog(server)):
        await join(log)
        seq = await say(log, SUBJECTS.request("bad"), b"{}")
        rejected = await watcher.until(RequestRejected)
        await submit(log)
        await answer(log, watcher)
        await watcher.until(RequestFinished)
    assert (rejected.submission_seq, rejected.failure.code) == (seq, "malformed_request")


@pytest.mark.parametrize("beat", [b"", b"junk", b"\xc1", b"\x93\x01\x02\x03", b"\x81\x01\x02"])
async def test_a_beat_that_is_none_stops_nobody(beat: bytes) -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    async with conducting(FakeLog(server)):
        await join(log)
        await submit(log, "r1")
        await watcher.until(NodeReady)  # so by now it listens
        await log.beat(SUBJECTS.beat("conductor", "other"), beat)
        await submit(log, "r2")
        await watcher.until(NodeReady, lambda event: event.request_id == "r2")
        await submit(log, "r3")
        await watcher.until(NodeReady, lambda event: event.request_id == "r3")


async def test_its_beats_count_what_it_folded_and_decided() -> None:
    server = FakeServer(SUBJECTS)
    log, watcher = FakeLog(server), Watcher(server)
    async with aclosing(FakeLog(server).listen(SUBJECTS.beats())) as beats, conducting(FakeLog(server)):
        await join(log)
        await submit(log)
        await watcher.until(NodeReady)
        async for _, data in beats:
            meters = msgspec.convert(msgspec.msgpack.decode(data)["meters"], ConductorMeters)
            if meters.decisions == 2 and meters.log.publish_ack_s.count == 3:
                break

    assert meters.folded >= 3  # its epoch, the worker, the request
