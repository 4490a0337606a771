"""A conductor on a real log, as its role is: it ends and starts again, with a snapshot or without."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from conductor import process
from conductor.process import ConductorOptions
from configs.deployment import DeploymentConfig, NodeGroup
from shared.events import (
    Event,
    Inputs,
    NodeReady,
    Params,
    RequestFinished,
    RequestSubmitted,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.nats import jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log
from shared.subjects import Subjects
from tests.conductor.script import completion

pytestmark = pytest.mark.timeout(60)
E = TypeVar("E", bound=Event)
Start = Callable[..., Any]


class World:
    """A log, and what a client and a worker do on it."""

    def __init__(self, log: Log, subjects: Subjects) -> None:
        self.log, self.subjects = log, subjects

    async def join(self) -> None:
        joined = WorkerJoined(
            id="w0", writer="w0", rank=0, model="demo", nodes=["prepare", "llm"], device="cpu"
        )
        await self.log.publish(self.subjects.worker(0), encode(joined))

    async def submit(self, request_id: str) -> None:
        event = RequestSubmitted(model="demo", inputs=Inputs(text="hi"), params=Params(max_tokens=4))
        await self.log.publish(self.subjects.request(request_id), encode(event))

    async def ordered(self, request_id: str, index: int) -> NodeReady:
        subject = self.subjects.ready(0, request_id)
        return await self.until(subject, NodeReady, lambda event: event.index == index)

    async def report(self, ready: NodeReady) -> None:
        await self.log.publish(self.subjects.done(0, str(ready.request_id)), encode(completion(ready)))

    async def until(self, subject: str, kind: type[E], which: Callable[[E], bool] = lambda _: True) -> E:
        async with aclosing(self.log.read([subject], 1)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, kind) and which(event):
                    return event
        raise AssertionError("the log ended")

    async def leads(self) -> int:
        """Wait until a conductor leads; how many events it has read by then."""
        async with aclosing(self.log.listen(self.subjects.heartbeat("conductor", "*"))) as beats:
            async for _, data in beats:
                beat = msgspec.msgpack.decode(data)
                if beat["state"] == "leading":
                    return int(beat["meters"]["folded"])
        raise AssertionError("no beats any more")


@pytest.fixture
async def world(nats_server: NatsServer, subjects: Subjects) -> AsyncGenerator[World, None]:
    where = {"url": nats_server.url, "credentials": nats_server.credentials, "subjects": subjects}
    await jetstream.provision(nats_server.url, nats_server.credentials, subjects)
    log = await jetstream.connect(**where, name="test")  # type: ignore[arg-type]  # of several types
    yield World(log, subjects)
    await log.close()


@pytest.fixture
def start(nats_server: NatsServer, subjects: Subjects, tmp_path: Path) -> Start:
    """Run a conductor until the block ends; `data_dir` is where it keeps what it knows."""

    @asynccontextmanager
    async def running(data_dir: Path | None = tmp_path) -> AsyncGenerator[None, None]:
        config = DeploymentConfig(
            model="decoder_lm",
            name="demo",
            max_seq_len=64,
            node_groups=[NodeGroup(node_names=["prepare", "llm"], ranks=[0])],
            data_dir=str(data_dir) if data_dir is not None else None,
        )
        options = ConductorOptions(
            config=config,
            nats_url=nats_server.url,
            credentials=nats_server.credentials,
            prefix=subjects.prefix,
            alone=True,
        )
        task = asyncio.create_task(process.run(options))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    return running


async def serve_one(world: World, request_id: str) -> None:
    await world.submit(request_id)
    for index in (0, 1):
        await world.report(await world.ordered(request_id, index))
    await world.until(world.subjects.walk(request_id), RequestFinished)


@pytest.mark.processes
async def test_it_goes_on_from_its_snapshot_and_reads_what_follows(
    world: World, start: Start, tmp_path: Path
) -> None:
    async with start():
        await world.join()
        await serve_one(world, "r1")
        await world.submit("r2")
        ready = await world.ordered("r2", 0)
    assert (tmp_path / "conductor" / "snapshot").exists()
    hearing = asyncio.create_task(world.leads())
    await world.report(ready)
    async with start():
        assert await hearing <= 3  # the report, its own epoch, and what it decided by then
        await world.report(await world.ordered("r2", 1))
        await world.until(world.subjects.walk("r2"), RequestFinished)


@pytest.mark.processes
async def test_a_snapshot_of_the_logs_very_end_is_used(world: World, start: Start, tmp_path: Path) -> None:
    async with start():
        await world.leads()
    hearing = asyncio.create_task(world.leads())
    async with start():
        assert await hearing == 1  # its own epoch


@pytest.mark.processes
@pytest.mark.parametrize("without", ["deleted", "never written"])
async def test_without_one_it_reads_the_log_and_goes_on_the_same(
    without: str, world: World, start: Start, tmp_path: Path
) -> None:
    where = tmp_path if without == "deleted" else None
    async with start(where):
        await world.join()
        await serve_one(world, "r1")
        await world.submit("r2")
        ready = await world.ordered("r2", 0)
    assert (tmp_path / "conductor").exists() == (without == "deleted")
    if without == "deleted":
        (tmp_path / "conductor" / "snapshot").unlink()
    known = (await world.log.state()).last_seq
    hearing = asyncio.create_task(world.leads())
    async with start(where):
        assert await hearing > known - 3
        await world.report(ready)
        await world.report(await world.ordered("r2", 1))
        await world.until(world.subjects.walk("r2"), RequestFinished)
