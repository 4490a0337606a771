"""The process of a rank that follows, on a log in memory, with an engine that the test ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from threading import Event as ThreadEvent
from typing import Never, TypeVar

import msgspec
import pytest

from models import registry
from shared.errors import ClientError
from shared.events import EpochOpened, Event, WorkerJoined, WorkerLeaving, WorkerLost, decode, encode
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from tests.workers import harness
from tests.workers.harness import SUBJECTS
from tests.workers.tensor_parallel.test_group import config
from workers.kv_engine.parallel.connection import GroupLostError
from workers.membership.incarnation import SupersededError
from workers.tensor_parallel import follower_process
from workers.tensor_parallel.follower_process import FollowerProcess
from workers.tensor_parallel.group import ENDPOINT_NAME, GroupMembership, gather

pytestmark = pytest.mark.processes


E = TypeVar("E", bound=Event)


@pytest.fixture(autouse=True)
def toy_is_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "graph", lambda family: harness.TOY)


@dataclass(slots=True)
class Engine:
    """Hears its leader out, as the real one does, and counts."""

    copy: GroupMembership
    kernels: str = "torch"
    forwards: int = 0
    heard: ThreadEvent = field(default_factory=ThreadEvent)

    def run(self) -> Never:
        while True:
            self.copy.connections[0].receive()
            self.forwards += 1
            self.heard.set()


@dataclass(slots=True)
class World:
    """A follower at work; the test is its leader, and its conductor."""

    log: MemoryLog
    follower: FollowerProcess
    task: "asyncio.Task[None]"
    engines: list[Engine] = field(default_factory=list)

    async def lead(self) -> GroupMembership:
        return await gather(self.log, SUBJECTS, config(0, 1), Rank(0))

    async def until(self, state: str) -> None:
        while self.follower.vital_signs()["state"] != state:  # noqa: ASYNC110 - it has no event of its own
            await asyncio.sleep(0)

    async def joined_as(self, seq: int) -> None:
        while self.follower.vital_signs()["incarnation"] != seq:  # noqa: ASYNC110 - it has no event of its own
            await asyncio.sleep(0)

    async def first(self, kind: type[E], start: int = 1) -> tuple[E, int]:
        async with aclosing(self.log.read([SUBJECTS.worker(1)], start)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, kind):
                    return event, record.seq
        raise AssertionError("the log ended")

    async def say(self, subject: str, event: Event) -> None:
        self.log.post(subject, encode(event))
        await self.log.drain()


@asynccontextmanager
async def at_work(refusal: Exception | None = None, *, loads_for_ever: bool = False) -> AsyncIterator[World]:
    server = MemoryStore(SUBJECTS)
    log, own = MemoryLog(server), MemoryLog(server)
    engines: list[Engine] = []
    may_end = ThreadEvent()

    def make(copy: GroupMembership, on_progress: Callable[[float], None]) -> Engine:
        on_progress(0.5)
        if refusal is not None:
            raise refusal
        if loads_for_ever:
            may_end.wait()
        engines.append(Engine(copy))
        return engines[-1]

    follower = FollowerProcess(own, SUBJECTS, config(0, 1), Rank(1), make)
    world = World(log, follower, asyncio.create_task(follower.run()), engines)
    try:
        yield world
    finally:
        may_end.set()
        world.task.cancel()
        await asyncio.wait([world.task])
        await log.close()
        await own.close()


@asynccontextmanager
async def led(world: World) -> AsyncIterator[GroupMembership]:
    copy = await world.lead()
    assert copy.rendezvous.listener is not None
    copy.rendezvous.listener.close()
    try:
        yield copy
    finally:
        copy.close()


def only(error: BaseException | None) -> BaseException | None:
    """The one error in groups of groups."""
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    return error


async def ended(world: World) -> BaseException | None:
    await asyncio.wait([world.task])
    return only(world.task.exception())


async def test_it_joins_at_once_and_is_ready_when_its_leader_has_come_and_its_part_is_there() -> None:
    async with at_work() as world:
        joined, seq = await world.first(WorkerJoined)
        assert (joined.rank, joined.nodes, list(joined.cards)) == (1, ["llm"], [ENDPOINT_NAME])
        loading = world.follower.vital_signs()
        assert (loading["state"], loading["kernels"]) == ("loading", "")

        async with led(world) as copy:
            await world.until("ready")
            copy.connections[0].send(b"a step")
            await asyncio.to_thread(world.engines[0].heard.wait)

            signs = world.follower.vital_signs()
            assert (signs["incarnation"], signs["steps"], signs["progress"]) == (seq, 1, 1.0)
            assert signs["kernels"] == "torch"
            assert signs["meters"].computed_tokens == 0, "what is computed, the leader counts"


async def test_it_ends_when_its_leader_is_gone() -> None:
    async with at_work() as world:
        async with led(world):
            await world.until("ready")

        error = await ended(world)
    assert isinstance(error, GroupLostError)
    assert "rank 0, which leads, is gone" in str(error)


async def test_told_to_stop_it_follows_to_its_leaders_end_and_leaves_in_order() -> None:
    async with at_work() as world:
        async with led(world) as copy:
            await world.until("ready")
            world.task.cancel()
            await world.until("draining")
            copy.connections[0].send(b"one more step")
            await asyncio.to_thread(world.engines[0].heard.wait)

        await asyncio.wait([world.task])
        assert world.task.cancelled()
        assert world.engines[0].forwards == 1
        await world.first(WorkerLeaving)


async def test_it_waits_not_for_ever_for_a_leader_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_process, "DRAIN_S", 0.0)
    async with at_work() as world, led(world):
        await world.until("ready")
        world.task.cancel()

        await asyncio.wait([world.task])
        assert world.task.cancelled()


async def test_one_that_nobody_leads_yet_leaves_at_once() -> None:
    async with at_work() as world:
        _, seq = await world.first(WorkerJoined)
        await world.joined_as(seq)
        world.task.cancel()

        await asyncio.wait([world.task])
        await world.first(WorkerLeaving)


async def test_what_cannot_be_served_is_refused_as_by_any_worker() -> None:
    async with at_work(ClientError("it does not divide")) as world, led(world):
        error = await ended(world)

    assert isinstance(error, ClientError)
    assert str(error) == "it does not divide"


async def test_given_up_by_the_conductor_it_joins_again_and_follows_on() -> None:
    """It may have been too busy with loading to be heard; its leader misses nothing."""
    async with at_work() as world, led(world) as copy:
        _, seq = await world.first(WorkerJoined)
        await world.until("ready")
        opened = EpochOpened(id="epoch.1", writer="conductor", epoch=1, conductor="c-1", core="c")
        await world.say(SUBJECTS.epoch, opened)
        for life, id_ in ((seq + 100, "another"), (seq, "this")):
            lost = WorkerLost(
                id=id_, writer="conductor", epoch=1, rank=1, incarnation=life, reason="not heard for 2 s"
            )
            await world.say(SUBJECTS.lost, lost)

        _, again = await world.first(WorkerJoined, seq + 1)
        await world.joined_as(again)
        copy.connections[0].send(b"a step")
        await asyncio.to_thread(world.engines[0].heard.wait)
        assert len(world.engines) == 1


async def test_a_leader_that_goes_while_this_rank_loads_is_not_waited_for() -> None:
    async with at_work(loads_for_ever=True) as world:
        async with led(world):
            while world.follower.vital_signs()["progress"] != 0.5:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

        error = await ended(world)
    assert isinstance(error, GroupLostError)


async def test_another_process_that_takes_its_rank_ends_it() -> None:
    async with at_work() as world:
        joined, _ = await world.first(WorkerJoined)
        newer = msgspec.structs.replace(joined, id="w1.joined.newer")
        for event in (joined, newer):  # a second copy of its own is none
            await world.say(SUBJECTS.worker(1), event)

        error = await ended(world)
    assert isinstance(error, SupersededError)


async def test_it_says_again_where_it_waits_before_the_log_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.membership.incarnation.REPEAT_JOIN_S", 0.001)
    async with at_work() as world:
        first, seq = await world.first(WorkerJoined)
        again, _ = await world.first(WorkerJoined, seq + 1)

    assert (again.id, again.incarnation, again.cards) == (first.id, seq, first.cards)
