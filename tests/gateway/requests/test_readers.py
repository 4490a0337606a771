import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from random import Random

import httpx
import pytest

from gateway.app import create_app
from gateway.http import server
from gateway.requests.readers import OtherGateways, ReaderRegistry, Readers, cancel_of
from gateway.requests.service import Gateway
from shared.events import Inputs, RequestCancel, RequestSubmitted, RequestWatched, decode, encode
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogRegressedError, StoredRecord
from shared.media.memory import MemoryMediaStore
from shared.subjects import Subjects
from tests.gateway.requests.test_disconnect import raw, wait_for_cancel
from tests.gateway.world import ORIGIN, World, deployment, listening

SUBJECTS = Subjects()
BODY = {"text": "x", "request_id": "r-1"}
OTHER = "g-other"


@asynccontextmanager
async def another(world: World, origin: str = OTHER) -> AsyncIterator[str]:
    """A second gateway on the world's log, on its own socket; it drains at the end."""
    gateway = Gateway(world.gateway.served, world.subjects, origin, world.gateway.settings)
    listener = server.bind("127.0.0.1", 0)

    async def follow() -> None:
        try:
            await gateway.follower.follow(MemoryLog(world.server), MemoryMediaStore())
        except* LogRegressedError:
            pass

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow())
        async with server.serving(create_app(gateway), listener, gateway.settings):
            await gateway.follower.followed.wait()
            yield server.url_of(listener)
            following.cancel()
            await asyncio.wait({following})


def said(world: World) -> list[tuple[str, str]]:
    """The records about the request's readers: their writer, and their meaning."""
    return [
        (
            event.writer,
            "over" if isinstance(event, RequestWatched) and event.is_over else type(event).__name__,
        )
        for event in world.events("control")
    ]


async def settled() -> None:
    """Let all gateways read the log to its end, and act on it."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.processes
async def test_a_request_that_nobody_takes_up_is_not_spoken_of() -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", BODY) as reader:
            await reader.readuntil(b'"modality"')
        await (await world.performance()).cancelled.wait()

    assert said(world) == [(ORIGIN, "RequestCancel")]


@pytest.mark.processes
@pytest.mark.parametrize("linger_s", [0, 0.02])
async def test_a_client_that_moved_on_keeps_its_request_when_the_gateway_it_left_notices(
    linger_s: float,
) -> None:
    body = BODY | {"linger_s": linger_s}
    async with deployment(wait_for_cancel) as world, listening(world) as url, another(world) as elsewhere:
        async with raw(url, "/generate", body) as lost:
            await lost.readuntil(b'"modality"')
            reader_at_other = raw(elsewhere, "/generate", body)
            reader = await reader_at_other.__aenter__()
            await reader.readuntil(b'"modality"')
            await world.until(lambda: (ORIGIN, "RequestWatched") in said(world))
        await world.until(lambda: (ORIGIN, "over") in said(world))  # once its grace is over
        await settled()
        assert (ORIGIN, "RequestCancel") not in said(world)
        await reader_at_other.__aexit__(None, None, None)
        await (await world.performance()).cancelled.wait()

    assert said(world)[-1] == (OTHER, "RequestCancel")


@pytest.mark.processes
async def test_a_client_that_comes_back_elsewhere_in_time_is_not_cancelled_when_its_time_is_over() -> None:
    body = BODY | {"linger_s": 0.1}
    async with deployment(wait_for_cancel) as world, listening(world) as url, another(world) as elsewhere:
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b'"modality"')
        await world.until(lambda: not world.gateway.in_flight.count)
        async with raw(elsewhere, "/generate", body) as reader:
            await reader.readuntil(b'"modality"')
            line = world.gateway.follower.connection
            assert line is not None
            await world.until(lambda: not len(line.submissions.readers))  # the grace is over
            await settled()
            assert said(world) == [(OTHER, "RequestWatched")]


@pytest.mark.processes
async def test_two_clients_at_two_gateways_keep_a_request_until_both_have_left() -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url, another(world) as elsewhere:
        async with raw(url, "/generate", BODY) as first:
            await first.readuntil(b'"modality"')
            async with raw(elsewhere, "/generate", BODY) as second:
                await second.readuntil(b'"modality"')
                await world.until(lambda: (ORIGIN, "RequestWatched") in said(world))
            await world.until(lambda: (OTHER, "over") in said(world))
            await settled()
            assert (OTHER, "RequestCancel") not in said(world)
        await (await world.performance()).cancelled.wait()

    assert said(world)[-1] == (ORIGIN, "RequestCancel")


@pytest.mark.processes
async def test_the_last_client_cancels_also_where_the_gateway_that_was_asked_has_died() -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        dead = RequestSubmitted(
            request_id="r-1",
            writer="g-dead",
            origin="g-dead",
            model="demo",
            inputs=Inputs(text="x"),
            created_s=1,
            is_first=True,
        )
        world.server.append(SUBJECTS.request("r-1"), encode(dead))
        async with raw(url, "/generate", BODY) as reader:
            await reader.readuntil(b'"modality"')
        await (await world.performance()).cancelled.wait()

    assert said(world) == [(ORIGIN, "RequestWatched"), (ORIGIN, "RequestCancel")]


@pytest.mark.processes
async def test_a_gateway_that_ends_leaves_what_it_watched_to_others() -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", BODY) as first:
            await first.readuntil(b'"modality"')
            async with another(world) as elsewhere:
                second = raw(elsewhere, "/generate", BODY)
                reader = await second.__aenter__()
                await reader.readuntil(b'"modality"')
                await world.until(lambda: (ORIGIN, "RequestWatched") in said(world))
            await second.__aexit__(None, None, None)
            await world.until(lambda: (OTHER, "over") in said(world))
        await (await world.performance()).cancelled.wait()

    assert said(world)[-1] == (ORIGIN, "RequestCancel")


@pytest.mark.processes
async def test_an_answer_that_is_fetched_again_is_not_spoken_of() -> None:
    async with deployment() as world, another(world) as elsewhere, httpx.AsyncClient() as client:
        first = await world.client.post("/generate", json=BODY)
        again = await client.post(f"{elsewhere}/generate", json=BODY)

    assert first.content == again.content
    assert said(world) == []


class TestAudiences:
    """The readers of one gateway, on a log that others write to."""

    @staticmethod
    def readers(store: MemoryStore, tasks: asyncio.TaskGroup) -> tuple[ReaderRegistry, Readers]:
        readers = ReaderRegistry(MemoryLog(store), SUBJECTS, "g-1", tasks, count(1), 9)
        audience = readers.enter("r", "r")
        audience.may_cancel = True
        return readers, audience

    async def test_a_cancel_that_others_were_faster_than_is_not_stored(self) -> None:
        store = MemoryStore()
        watched = RequestWatched(id="g-2.1", writer="g-2", request_id="r")
        async with asyncio.TaskGroup() as tasks:
            readers, audience = self.readers(store, tasks)
            store.append(SUBJECTS.control("r"), encode(watched))  # and not read by this gateway
            readers.leave(audience, "its client left", 0)

        assert len(store.records) == 1

    async def test_who_reads_no_more_is_no_reason_to_go_on(self) -> None:
        store = MemoryStore()
        async with asyncio.TaskGroup() as tasks:
            readers, audience = self.readers(store, tasks)
            for number, is_over in enumerate((False, True)):
                event = RequestWatched(id=f"g-2.{number}", writer="g-2", request_id="r", is_over=is_over)
                store.append(SUBJECTS.control("r"), encode(event))
            readers.leave(audience, "its client left", 0)

        assert store.records[-1].data == encode(cancel_of("r", "its client left", "g-1", 1))

    async def test_what_somebody_cancelled_is_not_cancelled_again(self) -> None:
        store = MemoryStore()
        async with asyncio.TaskGroup() as tasks:
            readers, audience = self.readers(store, tasks)
            store.append(SUBJECTS.control("r"), encode(RequestCancel(writer="nats", request_id="r")))
            readers.leave(audience, "its client left", 0)

        assert len(store.records) == 1


class Gate:
    """A gateway's readers of one request, on a log that it reads with a delay."""

    def __init__(self, store: MemoryStore, name: str, tasks: asyncio.TaskGroup) -> None:
        self.name = name
        self.readers = ReaderRegistry(MemoryLog(store), SUBJECTS, name, tasks, count(1), 9)
        self.clients: list[Readers] = []
        self.heard = 0
        self._store = store

    def come(self, *, is_first: bool) -> None:
        audience = self.readers.enter("r", "r")
        self.clients.append(audience)
        if is_first:
            audience.may_cancel = True
            return
        for record in self._store.records:
            audience.others.fold(record)
        self.readers.resumed(audience, has_ended=False)

    def go(self) -> None:
        self.readers.leave(self.clients.pop(), "its client left", 0)

    def hear(self) -> None:
        if self.heard < len(self._store.records):
            self.readers.receive("r", self._store.records[self.heard])
            self.heard += 1


@pytest.mark.parametrize("seed", range(80))
async def test_whoever_comes_and_goes_the_last_to_leave_cancels_and_nobody_before(seed: int) -> None:
    chance, store = Random(seed), MemoryStore()
    async with asyncio.TaskGroup() as tasks:
        gates = [Gate(store, name, tasks) for name in ("g-1", "g-2", "g-3")]
        gates[0].come(is_first=True)
        for _ in range(chance.randrange(1, 25)):
            gate = chance.choice(gates)
            there = sum(len(one.clients) for one in gates)
            match chance.randrange(4):
                case 0:
                    gate.come(is_first=False)
                case 1 if gate.clients and there > 1:
                    await settled()
                    while any(one.heard < len(store.records) for one in gates):
                        for one in gates:  # gateways announce before another leaves
                            one.hear()
                        await settled()
                    gate.go()
                case _:
                    gate.hear()
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        said = [decode(record.data, "control") for record in store.records]
        assert not any(isinstance(event, RequestCancel) for event in said)
        while leaving := [gate for gate in gates if gate.clients]:  # all at once, before any of them reads
            chance.choice(leaving).go()
            for _ in range(chance.randrange(2)):
                await asyncio.sleep(0)

    said = [decode(record.data, "control") for record in store.records]
    assert sum(isinstance(event, RequestCancel) for event in said) == 1, said


def test_who_reads_elsewhere_is_what_each_said_last_in_whatever_order_it_is_heard() -> None:
    def record(seq: int, writer: str, *, is_over: bool = False) -> StoredRecord:
        event = RequestWatched(id=f"{writer}.{seq}", writer=writer, request_id="r", is_over=is_over)
        return StoredRecord(seq, SUBJECTS.control("r"), encode(event), 0)

    elsewhere = OtherGateways()
    for one in (
        record(4, "b", is_over=True),
        record(2, "a"),
        record(1, "b"),
        record(3, "own"),
        record(2, "a"),
    ):
        elsewhere.fold(one)

    assert elsewhere.watchers("own") == {"a"}
    assert (elsewhere.seq, elsewhere.is_cancelled) == (4, False)
    elsewhere.fold(StoredRecord(5, SUBJECTS.control("r"), b"{}", 0))
    elsewhere.fold(StoredRecord(6, SUBJECTS.control("r"), b"nothing", 0))
    assert (elsewhere.seq, elsewhere.is_cancelled) == (6, True)
