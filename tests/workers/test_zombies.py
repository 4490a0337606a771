"""A worker that was given up, and lives: real processes, on a real log. It changes nothing.

The test is the conductor, and does what that does: it declares the life over, fences the output off, and
orders the next attempt, of the next life or of another process.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import pytest

from dalsegno.config import environment
from shared.events import (
    AnyEvent,
    Event,
    OutputChunk,
    OutputFence,
    WalkCompleted,
    WorkerJoined,
    WorkerLost,
    decode,
    encode,
)
from shared.log.nats import jetstream
from shared.log.nats.jetstream import JetStreamLog
from shared.log.nats.private_server import NatsServer
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from shared.transcript import Transcript
from tests.admissions import admitted
from tests.chaos.proxy import Proxy
from tests.tiny import tiny_checkpoint
from tests.workers import harness
from tests.workers.harness import RANK

pytestmark = pytest.mark.timeout(200)
E = TypeVar("E", bound=Event)
TOKENS: Final = 450
PROMPT: Final = [5, 17, 99, 3, 42]


@dataclass(frozen=True, slots=True)
class Conductor:
    """The test's own way to the log."""

    log: JetStreamLog
    subjects: Subjects

    async def put(self, subject: str, event: Event) -> int:
        return await self.log.publish(subject, encode(event))

    async def until(
        self, subject: str, kind: type[E], which: Callable[[E, StoredRecord], bool] = lambda *_: True
    ) -> tuple[int, E]:
        """The first such event on a subject, and where it is."""
        async with asyncio.timeout(60), aclosing(self.log.read([subject], 1)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, kind) and which(event, record):
                    return record.seq, event
        raise AssertionError

    async def order(self, request_id: str, life: int, attempt: int = 1) -> None:
        calls = harness.chat(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        ready = harness.ready(request_id, *calls, step=1, seed=3, attempt=attempt)
        placement = {"prepare": RANK, "llm": RANK}
        ready = msgspec.structs.replace(ready, incarnation=life, placement=placement)
        await self.put(self.subjects.walk(request_id), admitted(request_id))
        await self.put(self.subjects.ready(RANK, request_id), ready)

    async def tokens_of(self, request_id: str, count: int, attempt: int) -> None:
        """Wait until an attempt has stored so many tokens."""
        found = 0

        def enough(chunk: OutputChunk, _: StoredRecord) -> bool:
            nonlocal found
            found += len(chunk.token_ids) if chunk.attempt == attempt else 0
            return found >= count

        await self.until(self.subjects.outputs_of(request_id), OutputChunk, enough)

    async def fence(self, request_id: str, attempt: int) -> int:
        subject = self.subjects.output("g-1", request_id, "conductor")
        return await self.put(subject, harness.fence(request_id, attempt))

    async def done(self, request_id: str, attempt: int, life: int) -> WalkCompleted:
        def mine(event: WalkCompleted, _: StoredRecord) -> bool:
            return (event.attempt, event.incarnation) == (attempt, life)

        return (await self.until(self.subjects.done(RANK, request_id), WalkCompleted, mine))[1]

    async def events(self, request_id: str) -> list[tuple[int, AnyEvent]]:
        async with aclosing(self.log.history(self.subjects.all_of(request_id))) as records:
            return [(record.seq, decode(record.data)) async for record in records]


@pytest.fixture
async def conductor(nats_server: NatsServer, subjects: Subjects) -> AsyncIterator[Conductor]:
    credentials = nats_server.credentials
    await jetstream.provision(nats_server.url, credentials, subjects)
    log = await jetstream.connect(
        nats_server.url, credentials=credentials, subjects=subjects, name="conductor"
    )
    yield Conductor(log, subjects)
    await log.close()


@contextmanager
def worker(url: str, token: str, subjects: Subjects, said: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker's process, killed at the end."""
    command = [sys.executable, "-m", "dalsegno", "worker", "--config", str(tiny_checkpoint("qwen3"))]
    command += ["--rank", "0", "--nats", url, "--prefix", subjects.prefix]
    env = {**os.environ, environment.NATS_TOKEN: token}
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def text_of(events: list[tuple[int, AnyEvent]]) -> tuple[str, list[int], list[int]]:
    """What a client has of it: text, tokens, and the attempts they are from."""
    transcript, chunks = Transcript(), list[OutputChunk]()
    for _, event in events:
        if isinstance(event, OutputChunk | OutputFence):
            chunks += transcript.fold(event)
    attempts = sorted({chunk.attempt for chunk in chunks})
    return "".join(c.text for c in chunks), [id for c in chunks for id in c.token_ids], attempts


async def test_who_was_given_up_joins_again_or_ends_and_its_late_words_count_for_nothing(
    conductor: Conductor, nats_server: NatsServer, subjects: Subjects, tmp_path: Path
) -> None:
    joins = subjects.worker(RANK)

    async def give_up(life: int, attempt: int) -> int:
        """Declare a life over, and fence its output off; where that is."""
        lost = WorkerLost(
            id=f"lost.{life}", writer="conductor", epoch=1, rank=RANK, incarnation=life, reason="unheard"
        )
        await conductor.put(subjects.lost, lost)
        return await conductor.fence("r", attempt)

    async def next_life(behind: int) -> tuple[int, WorkerJoined]:
        return await conductor.until(joins, WorkerJoined, lambda _, record: record.seq > behind)

    async with Proxy(urlsplit(nats_server.url).port or 0) as proxy:
        with worker(proxy.url, nats_server.token, subjects, tmp_path / "first") as zombie:
            first, _ = await next_life(0)
            await conductor.order("whole", first)
            whole = await conductor.done("whole", 1, first)
            undisturbed = text_of(await conductor.events("whole"))

            # Cut off, it goes on, and keeps what it has to say.
            await conductor.order("r", first)
            await conductor.tokens_of("r", TOKENS // 10, attempt=1)
            proxy.cut()
            fenced = await give_up(first, attempt=2)
            await asyncio.sleep(0.3)  # it computes; nobody hears of it
            proxy.heal()
            second, joined = await next_life(fenced)
            assert joined.pid == zombie.pid

            # Its next life goes on behind the fence, and stands still; given up, it wakes.
            await conductor.order("r", second, attempt=2)
            await conductor.tokens_of("r", TOKENS // 10, attempt=2)
            zombie.send_signal(signal.SIGSTOP)
            fenced_again = await give_up(second, attempt=3)
            zombie.send_signal(signal.SIGCONT)
            third, joined = await next_life(fenced_again)
            assert joined.pid == zombie.pid

            # So does the one after that, and meanwhile another process takes the rank.
            await conductor.order("r", third, attempt=3)
            await conductor.tokens_of("r", TOKENS // 10, attempt=3)
            zombie.send_signal(signal.SIGSTOP)
            with worker(nats_server.url, nats_server.token, subjects, tmp_path / "second"):
                fourth, joined = await next_life(third)
                assert joined.pid != zombie.pid
                await conductor.fence("r", 4)
                await conductor.order("r", fourth, attempt=4)
                zombie.send_signal(signal.SIGCONT)
                done = await conductor.done("r", 4, fourth)
                assert await asyncio.to_thread(zombie.wait, 60) == 1
                assert "has joined again" in (tmp_path / "first").read_text()

    events = await conductor.events("r")
    text, token_ids, attempts = text_of(events)
    assert (text, token_ids) == undisturbed[:2]
    assert len(token_ids) == TOKENS
    assert attempts == [1, 2, 3, 4]
    assert done.results[-1].facts == whole.results[-1].facts
    late = [seq for seq, e in events if isinstance(e, OutputChunk) and e.attempt == 1 and seq > fenced]
    assert late, "nothing it said came late: this proves nothing"
    lives = {e.incarnation for _, e in events if isinstance(e, WalkCompleted) and e.attempt > 1}
    assert lives == {fourth}
