"""A real nats-server that is away in the middle of streams, and a worker with the real engine.

What runs goes on until so much waits for the log that the rows are held; then nothing is computed, nothing
fails, and what is kept is bounded. When the server answers again all goes on by itself, and nobody can tell.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

from configs.checks import resolve
from configs.deployment import DeploymentConfig
from shared.events import Event, OutputChunk, WalkCompleted, WorkerJoined, decode, encode
from shared.log.nats import jetstream
from shared.log.nats.jetstream import JetStreamLog
from shared.log.nats.outbox import Outbox
from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects
from tests.tiny import tiny_checkpoint
from tests.workers import harness
from tests.workers.cluster import until
from tests.workers.harness import RANK
from tests.workers.kv_engine.oracle import prompts
from workers import settings
from workers.data_plane.store import open_store
from workers.kv_engine.counters import EngineStats
from workers.loading.model import LocalModel
from workers.process import Worker

pytestmark = pytest.mark.processes


STREAMS: Final = 6
TOKENS: Final = 300
OUTBOX: Final = 8
"""So many events may wait for the server."""
PER_CHUNK: Final = 16


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a second of a tiny model's work reaches."""
    assert Outbox.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Outbox.__init__.__kwdefaults__, "max_entries", OUTBOX)
    monkeypatch.setattr("workers.generation.output_chunks.MAX_CHUNK_TOKENS", PER_CHUNK)


@pytest.fixture
async def server(tmp_path: Path, subjects: Subjects) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    await jetstream.provision(server.url, server.credentials, subjects)
    yield server
    server.kill()


@dataclass(slots=True)
class Served:
    """A worker on a real log, and the test's own way to that."""

    server: NatsServer
    subjects: Subjects
    log: JetStreamLog
    workers_log: JetStreamLog
    model: LocalModel
    incarnation: int = 0

    def put(self, subject: str, event: Event) -> None:
        self.log.post(subject, encode(event))

    def order(self, request_id: str, prompt: list[int]) -> None:
        calls = harness.chat(prompt, max_tokens=TOKENS, ignore_eos=True)
        ready = harness.ready(request_id, *calls, step=1, seed=3)
        placement = {"prepare": RANK, "llm": RANK}
        ready = msgspec.structs.replace(ready, incarnation=self.incarnation, placement=placement)
        self.put(self.subjects.ready(RANK, request_id), ready)

    @property
    def stats(self) -> EngineStats:
        return self.model.counters() or EngineStats()

    async def answer(self, request_id: str) -> tuple[list[int], WalkCompleted]:
        """The tokens of an answer, in the order of the log, once it is complete."""
        tokens: list[int] = []
        async with aclosing(self.log.read(self.subjects.all_of(request_id), 1)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, OutputChunk) and event.token_offset == len(tokens):
                    tokens += event.token_ids
                if isinstance(event, WalkCompleted):
                    return tokens, event
        raise AssertionError


@pytest.fixture
async def served(server: NatsServer, subjects: Subjects, bounded: None) -> AsyncIterator[Served]:
    config: DeploymentConfig = msgspec.structs.replace(
        resolve(str(tiny_checkpoint("qwen3"))), model_kwargs={"device": "cpu", "max_sequences": 16}
    )

    async def connect(name: str) -> JetStreamLog:
        return await jetstream.connect(
            server.url, credentials=server.credentials, subjects=subjects, name=name, timeout_s=20
        )

    own, workers_log = await connect("test"), await connect("worker")
    store = open_store(total_bytes=1 << 20)
    model = LocalModel(config, settings.parse(config.model_kwargs), RANK, store.allocate)
    served = Served(server, subjects, own, workers_log, model)
    working = asyncio.create_task(Worker(workers_log, subjects, config, RANK, model, store).run())
    async with aclosing(own.read([subjects.worker(RANK)], 1)) as records:
        async for record in records:
            assert isinstance(decode(record.data), WorkerJoined)
            served.incarnation = record.seq
            break
    yield served
    working.cancel()
    await asyncio.wait([working])
    for log in (own, workers_log):
        await log.close()
    await store.close()


def stop(server: NatsServer) -> Callable[[], None]:
    """Let the server stand still; what lets it go on."""
    assert server.pid is not None
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def kill(server: NatsServer) -> Callable[[], None]:
    """Kill the server; what starts it again."""
    server.kill()
    return server.start


@pytest.mark.parametrize("away", [stop, kill])
async def test_while_the_log_is_away_a_bounded_lot_waits_and_then_all_goes_on_by_itself(
    away: Callable[[NatsServer], Callable[[], None]], served: Served
) -> None:
    asked = prompts(STREAMS, seed=4)
    for number, prompt in enumerate(asked):
        served.order(f"undisturbed{number}", prompt)
    undisturbed = [(await served.answer(f"undisturbed{number}"))[0] for number in range(STREAMS)]
    for number, prompt in enumerate(asked):
        served.order(f"r{number}", prompt)
    before = served.stats.work.sampled_tokens
    await until(lambda: served.stats.work.sampled_tokens > before + STREAMS * PER_CHUNK)
    back = away(served.server)
    try:
        await until(lambda: served.stats.held == served.stats.running == STREAMS)
        sampled, forwards = served.stats.work.sampled_tokens - before, served.stats.forwards
        assert sampled < STREAMS * TOKENS, "it was away too late to disturb anybody"
        for _ in range(1000):  # whatever can happen now, happens
            await asyncio.sleep(0)
        await until(lambda: served.stats.held == STREAMS)
        assert served.stats.forwards - forwards <= 1  # one was under way
        assert served.workers_log.stats().unacked <= OUTBOX
    finally:
        back()

    for number, expected in enumerate(undisturbed):
        tokens, done = await served.answer(f"r{number}")
        assert tokens == expected
        assert done.results[-1].facts == {"completion_tokens": TOKENS, "finish_reason": "length"}
    assert served.stats.held == served.stats.running == served.stats.kv_used == 0
