"""Conductors at work in a test, and what there is around them: logs in memory, workers that beat."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec

from conductor.core.cluster import Cluster
from conductor.process import Conductor
from configs.deployment import RecoverySettings
from models import registry
from shared.events import (
    AnyEvent,
    Event,
    Inputs,
    NodeReady,
    Params,
    RequestSubmitted,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS, completion, deployment

E = TypeVar("E", bound=Event)

QUICK: Final = RecoverySettings(worker_silent_s=0.3, leader_silent_s=0.3)
"""Beats every 50 ms, and an answer within 100 ms."""
SLOW: Final = RecoverySettings(worker_silent_s=600, leader_silent_s=600)
"""Nobody is ever missed."""


@asynccontextmanager
async def conducting(
    log: MemoryLog, name: str = "c1", recovery: RecoverySettings = QUICK, **options: Any
) -> AsyncGenerator[Conductor, None]:
    """A conductor at work; it leaves in order at the end of the block, unless its log is closed."""
    cluster = options.pop("cluster", None) or Cluster(registry.graph, SUBJECTS)
    conductor = Conductor(log, cluster, deployment(), SUBJECTS, name, recovery=recovery, **options)
    task = asyncio.create_task(conductor.run())
    try:
        yield conductor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
            await task


class Watcher:
    """Reads the log from its beginning until something is there."""

    def __init__(self, server: MemoryStore) -> None:
        self.log = MemoryLog(server)
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


async def say(log: MemoryLog, subject: str, event: Event | bytes) -> int:
    return await log.publish(subject, event if isinstance(event, bytes) else encode(event))


async def join(log: MemoryLog) -> int:
    event = WorkerJoined(
        id="w0-a", writer="w0", rank=0, model="demo", nodes=["prepare", "llm"], device="cpu", kv_tokens=128
    )
    return await say(log, SUBJECTS.worker(0), event)


async def submit(log: MemoryLog, request_id: str = "r1", **fields: Any) -> int:
    event = RequestSubmitted(model="demo", inputs=Inputs(text="hi"), params=Params(max_tokens=4), **fields)
    return await say(log, SUBJECTS.request(request_id), event)


async def answer(log: MemoryLog, watcher: Watcher, orders: int = 2) -> None:
    for _ in range(orders):
        ready = await watcher.until(NodeReady)
        await say(log, SUBJECTS.done(0, str(ready.request_id)), completion(ready))


async def beats_of(log: MemoryLog, name: str) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(log.listen(SUBJECTS.heartbeat("conductor", name))) as beats:
        async for _, data in beats:
            yield msgspec.msgpack.decode(data)


async def until_it_says(log: MemoryLog, name: str, state: str, times: int = 1) -> dict[str, Any]:
    """Listen until a conductor has said so often in a row that it is in this state."""
    said = 0
    async with aclosing(beats_of(log, name)) as beats:
        async for beat in beats:
            said = said + 1 if beat["state"] == state else 0
            if said == times:
                return beat
    raise AssertionError("the log ended")


@asynccontextmanager
async def beating(
    log: MemoryLog, incarnation: int, rank: int = 0, **signs: Any
) -> AsyncGenerator[None, None]:
    """A worker says that it lives, until the end of the block."""

    async def beat() -> None:
        while True:
            signs_of_life = {"state": "ready", "incarnation": incarnation, **signs}
            await log.send_heartbeat(
                SUBJECTS.heartbeat("worker", str(rank)), msgspec.msgpack.encode(signs_of_life)
            )
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])
