"""A worker's life on a log in memory, with an engine driven by hand."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest

from configs.deployment import ConfigError, DataPlaneSettings, DeploymentConfig, NodeGroup
from models import registry
from models.base import CpuResult
from shared.errors import CapacityError, ClientError, WorkerError
from shared.events import (
    AnyEvent,
    EpochOpened,
    Event,
    NodeReady,
    OutputChunk,
    WalkCall,
    WalkCompleted,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.meters import EncoderMeters, StepMeters, WorkerMeters
from tests.workers import harness
from tests.workers.harness import EOS, RANK, SUBJECTS, FakeEngine, ToyProcessing, chat
from workers import process
from workers.data_plane.store import open_store
from workers.generation.engine_client import EngineClient
from workers.loading.model import Loaded
from workers.loading.tensor_store import open_tensors
from workers.membership.incarnation import SupersededError
from workers.process import EngineStuckError, Worker

E = TypeVar("E", bound=Event)
CONFIG = DeploymentConfig(
    model="toy",
    name="toy-1",
    checkpoint="/nowhere",
    max_seq_len=128,
    node_groups=[NodeGroup(node_names=["greet", "llm", "painter"], ranks=[0])],
)


@pytest.fixture(autouse=True)
def toy_is_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "graph", lambda family: harness.TOY)


@dataclass(slots=True)
class FakeModel:
    """A model of which the test says when it is loaded, and when it dies."""

    progress: float = 0.25
    engine: FakeEngine | None = None
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    death: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_closed: bool = False

    def counters(self) -> None:
        return None

    def encoder_caches(self) -> EncoderMeters:
        return EncoderMeters()

    def stepped_nodes(self) -> dict[str, StepMeters]:
        return {}

    async def load(self, rows: EngineClient) -> Loaded:
        await self.may_load.wait()
        self.engine = FakeEngine(rows)
        return Loaded(graph=harness.TOY, processing=ToyProcessing(), engine=self.engine, kv_tokens=512)

    async def wait(self) -> None:
        await self.death

    async def close(self) -> None:
        self.is_closed = True


@dataclass(slots=True)
class Life:
    """One worker under test, and the log it lives on."""

    server: MemoryStore
    log: MemoryLog
    model: FakeModel
    task: "asyncio.Task[None]"
    epoch: int = 1

    async def event(self, kind: type[E], count: int = 1) -> E:
        """The `count`-th event of a kind, once it is stored."""
        async with aclosing(self.log.read([f"{SUBJECTS.prefix}.>"], 1)) as records:
            async for record in records:
                found = decode(record.data)
                if isinstance(found, kind):
                    count -= 1
                    if count == 0:
                        return found
        raise AssertionError

    async def incarnation(self, count: int = 1) -> int:
        joined = await self.event(WorkerJoined, count)
        return next(record.seq for record in self.server.records if decode(record.data).id == joined.id)

    async def beat(self, state: str) -> dict[str, object]:
        """The next beat that says so."""
        async with aclosing(self.log.listen(SUBJECTS.heartbeat("worker", "0"))) as beats:
            async for _, data in beats:
                signs = msgspec.msgpack.decode(data, type=dict[str, object])
                if signs["state"] == state:
                    return signs
        raise AssertionError

    def order(self, request_id: str, *walks: WalkCall, incarnation: int) -> NodeReady:
        ready = msgspec.structs.replace(
            harness.ready(request_id, *(walks or chat())), incarnation=incarnation, epoch=self.epoch
        )
        self.server.append(SUBJECTS.ready(RANK, request_id), encode(ready))
        return ready

    def put(self, subject: str, event: Event) -> None:
        self.server.append(subject, encode(event))

    def events(self) -> list[AnyEvent]:
        return [decode(record.data) for record in self.server.records]

    @property
    def engine(self) -> FakeEngine:
        assert self.model.engine is not None
        return self.model.engine


@asynccontextmanager
async def living(server: MemoryStore | None = None, *, loaded: bool = True) -> AsyncIterator[Life]:
    """A worker that runs, and is cancelled at the end unless it has ended."""
    server = server or MemoryStore(SUBJECTS)
    log, model, store = MemoryLog(server), FakeModel(), open_store(total_bytes=1 << 20)
    if loaded:
        model.may_load.set()
    worker = Worker(log, SUBJECTS, CONFIG, RANK, model, store)
    task = asyncio.create_task(process.live(worker, harness.heartbeat(server)))
    try:
        yield Life(server, log, model, task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        await log.close()
        await store.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DRAIN_S", 0.0)


async def test_it_joins_and_says_what_it_hosts() -> None:
    async with living() as life:
        joined = await life.event(WorkerJoined)

        assert (joined.rank, joined.model) == (0, "toy-1")
        assert set(joined.nodes) == set(harness.TOY.nodes)
        assert (joined.kv_tokens, joined.max_seq_len, joined.number) == (512, 128, 1)
        assert joined.pid > 0


async def test_it_says_again_who_it_is_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.membership.incarnation.REPEAT_JOIN_S", 0.01)
    async with living() as life:
        first = await life.event(WorkerJoined)
        at = await life.incarnation()
        again = await life.event(WorkerJoined, 2)

    assert (again.id, again.incarnation) == (first.id, at)


@pytest.mark.slow
async def test_it_answers_orders_of_its_own_life_and_no_others() -> None:
    async with living() as life:
        at = await life.incarnation()
        await life.beat("ready")
        life.order("old", incarnation=at - 1)
        life.order("r", incarnation=at)
        await life.engine.has()
        life.engine.says["r"] = [65, EOS]
        life.engine.run_out()
        done = await life.event(WalkCompleted)

        assert (done.request_id, done.incarnation, done.writer) == ("r", at, "w0")
        assert [spec.key for spec in life.engine.submitted] == ["r.1.0.llm"]
        numbers = [event.number for event in life.events() if event.writer == "w0"]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_stop_read_from_the_log_stops() -> None:
    async with living() as life:
        order = life.order("r", incarnation=await life.incarnation())
        await life.engine.has()
        life.put(SUBJECTS.ready(RANK, "r"), harness.stop(order).order)

        assert (await life.event(WalkStopped)).steps_after == 1


async def test_beats_tell_how_it_is() -> None:
    async with living(loaded=False) as life:
        loading = await life.beat("loading")
        assert (loading["progress"], loading["incarnation"]) == (0.25, None)
        life.model.may_load.set()
        ready = await life.beat("ready")

        assert ready["incarnation"] == await life.incarnation()
        assert {"rank", "steps", "running", "waiting", "kv_used", "kv_total", "model", "pid"} <= set(ready)
        assert ready["kernels"] == "", "it has no engine"
        meters = msgspec.convert(ready["meters"], WorkerMeters)
        assert meters.log.publish_ack_s.count == 1  # of `worker.joined`


async def test_told_to_stop_it_finishes_what_runs_takes_nothing_new_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "DRAIN_S", 30.0)
    async with living() as life:
        at = await life.incarnation()
        life.order("r", incarnation=at)
        await life.engine.has()
        life.task.cancel()
        await life.beat("draining")
        life.order("late", incarnation=at)
        life.engine.says["r"] = [65, EOS]
        life.engine.run_out()
        leaving = await life.event(WorkerLeaving)
        await asyncio.wait([life.task])

        assert leaving.incarnation == at
        kinds = [type(event) for event in life.events() if event.writer == "w0"]
        assert kinds == [WorkerJoined, OutputChunk, OutputChunk, WalkCompleted, WorkerLeaving]
        assert life.task.cancelled()
        assert life.model.is_closed


async def test_what_is_unfinished_at_the_deadline_is_left_without_a_word() -> None:
    async with living() as life:
        life.order("r", incarnation=await life.incarnation())
        await life.engine.has()
        life.task.cancel()
        await asyncio.wait([life.task])

        kinds = [type(event) for event in life.events() if event.writer == "w0"]
        assert kinds == [WorkerJoined, WorkerLeaving]
        assert life.engine.cancelled == ["r.1.0.llm"]


async def test_told_to_stop_while_it_loads_it_stops_at_once() -> None:
    async with living(loaded=False) as life:
        await life.beat("loading")
        life.task.cancel()
        await asyncio.wait([life.task])

        assert life.task.cancelled()
        assert not life.server.records


async def test_a_newer_life_of_its_rank_ends_it() -> None:
    async with living() as life:
        await life.incarnation()
        newer = WorkerJoined(id="w0.joined.newer", rank=0, model="toy-1", nodes=[], device="cpu")
        life.put(SUBJECTS.worker(RANK), newer)
        await asyncio.wait([life.task])

        [error] = leaves(life.task.exception())
        assert isinstance(error, SupersededError)
        assert "as incarnation 2" in error.message


async def test_a_late_copy_of_an_earlier_life_does_not_end_it() -> None:
    server = MemoryStore(SUBJECTS)
    earlier = WorkerJoined(id="w0.joined.earlier", rank=0, model="toy-1", nodes=[], device="cpu")
    server.append(SUBJECTS.worker(RANK), encode(earlier))
    async with living(server) as life:
        at = await life.incarnation(2)
        life.put(SUBJECTS.worker(RANK), earlier)
        life.order("r", incarnation=at)
        await life.engine.has()

        assert not life.task.done()


async def test_given_up_by_the_conductor_it_joins_again_with_the_model_it_has() -> None:
    async with living() as life:
        at = await life.incarnation()
        life.order("r", incarnation=at)
        await life.engine.has()
        lost = WorkerLost(id="l", writer="conductor", epoch=1, rank=0, incarnation=at, reason="silent")
        life.put(SUBJECTS.conductor("lost"), lost)
        again = await life.incarnation(2)
        life.order("q", incarnation=again)
        await life.engine.until(lambda engine: list(engine.specs) == ["q.1.0.llm"])

        assert again > at
        assert life.engine.cancelled == ["r.1.0.llm"]
        assert not [event for event in life.events() if isinstance(event, WalkStopped)]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
async def test_it_joins_again_when_nothing_of_its_last_life_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    begun, done = threading.Event(), threading.Event()

    def held(self: ToyProcessing, *_: object) -> CpuResult:
        begun.set()
        done.wait()
        raise ClientError("nobody waits for this any more")

    monkeypatch.setattr(ToyProcessing, "run", held)
    monkeypatch.setattr(process, "ABANDON_S", 30.0 if ends else 0.05)
    async with living() as life:
        at = await life.incarnation()
        greet = WalkCall(name="greet", inputs={"name": harness.text("you")})
        life.order("r", greet, incarnation=at)
        await asyncio.to_thread(begun.wait)
        lost = WorkerLost(id="l", writer="conductor", epoch=1, rank=0, incarnation=at, reason="silent")
        life.put(SUBJECTS.lost, lost)
        try:
            if ends:
                for _ in range(200):
                    await asyncio.sleep(0)
                assert len([event for event in life.events() if isinstance(event, WorkerJoined)]) == 1
                done.set()
                assert await life.incarnation(2) > at
            else:
                await asyncio.wait([life.task])
                [error] = leaves(life.task.exception())
                assert isinstance(error, EngineStuckError)
        finally:
            done.set()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never comes back from its step."""
    monkeypatch.setattr(process, "ABANDON_S", 0.05)
    monkeypatch.setattr(process, "FINAL_EVENTS_S", 0.05)
    monkeypatch.setattr(FakeEngine, "cancel", lambda self, key: self.cancelled.append(key))


async def test_given_up_with_an_engine_that_hangs_it_ends_for_only_a_new_process_can_begin_anew(
    stuck: None,
) -> None:
    async with living() as life:
        at = await life.incarnation()
        for name in "rq":
            life.order(name, incarnation=at)
        await life.engine.has(2)
        lost = WorkerLost(id="l", writer="conductor", epoch=1, rank=0, incarnation=at, reason="hangs")
        life.put(SUBJECTS.lost, lost)
        await asyncio.wait([life.task])

        [error] = leaves(life.task.exception())
        assert isinstance(error, EngineStuckError)
        assert "did not drop its sequences within 0.05 s" in error.message
        assert len([event for event in life.events() if isinstance(event, WorkerJoined)]) == 1
        assert life.model.is_closed


async def test_told_to_stop_with_an_engine_that_hangs_it_still_says_that_it_leaves(stuck: None) -> None:
    async with living() as life:
        life.order("r", incarnation=await life.incarnation())
        await life.engine.has()
        life.task.cancel()
        await asyncio.wait([life.task])

        kinds = [type(event) for event in life.events() if event.writer == "w0"]
        assert kinds == [WorkerJoined, WorkerLeaving]


async def test_orders_of_a_conductor_deposed_before_it_joined_are_void() -> None:
    server = MemoryStore(SUBJECTS)
    server.append(
        SUBJECTS.epoch, encode(EpochOpened(id="e", writer="conductor", epoch=4, conductor="c", core=""))
    )
    async with living(server) as life:
        at = await life.incarnation()
        life.order("void", incarnation=at)
        life.epoch = 4
        life.order("r", incarnation=at)
        await life.engine.has()

        assert list(life.engine.specs) == ["r.1.0.llm"]


async def test_while_the_log_is_away_what_runs_goes_on() -> None:
    async with living() as life:
        life.order("r", incarnation=await life.incarnation())
        await life.engine.has()
        life.server.stop()
        life.engine.says["r"] = [65, 66, EOS]
        life.engine.run_out()
        life.server.start()
        done = await life.event(WalkCompleted)

        assert done.results[-1].facts == {"completion_tokens": 3, "finish_reason": "stop", "stop_reason": EOS}


async def test_an_engine_that_dies_ends_the_process() -> None:
    async with living() as life:
        await life.incarnation()
        life.model.death.set_exception(WorkerError("the device fell off"))
        await asyncio.wait([life.task])

        [error] = leaves(life.task.exception())
        assert isinstance(error, WorkerError)


def leaves(error: BaseException | None) -> list[BaseException]:
    """The errors in a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [] if error is None else [error]


# ---- the data plane ------------------------------------------------------------------------------------


def on_two_ranks(**plane: Any) -> DeploymentConfig:
    groups = [NodeGroup(node_names=["greet", "llm", "painter"], ranks=[0, 1])]
    settings = DataPlaneSettings(arena_bytes=1 << 23, **plane)
    return msgspec.structs.replace(CONFIG, node_groups=groups, data_plane=settings)


async def test_on_one_rank_it_is_open_to_nobody() -> None:
    store = open_tensors(CONFIG, 0)
    try:
        assert set(store.endpoints) == {"local"}
    finally:
        await store.close()


@pytest.mark.processes
@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_of_another_machine_is_a_mistake(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"data plane of rank 1 \(address {address}, port 0"):
        open_tensors(on_two_ranks(address=address), 1)


@pytest.mark.processes
async def test_a_port_that_is_taken_may_be_free_later() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] - 1
        with pytest.raises(CapacityError, match=rf"port {port + 1}, "):
            open_tensors(on_two_ranks(port=port), 1)


@pytest.mark.processes
def test_the_worker_is_imported_without_torch() -> None:
    script = "import sys, workers.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
