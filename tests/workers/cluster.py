"""Several workers in one process, on a log in memory; the test is their conductor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from configs.deployment import DeploymentConfig
from configs.placement import assign, rank_of
from models.base import ModelGraph
from shared.events import (
    AnyEvent,
    Event,
    NodeReady,
    OutputChunk,
    RequestCancelled,
    RequestFinished,
    RequestResumed,
    Usage,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    decode,
    encode,
)
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from tests.admissions import admitted
from tests.workers.harness import SUBJECTS
from workers.data_plane.port import TensorStore
from workers.data_plane.store import ArenaStore, open_store
from workers.loading.model import Model
from workers.process import Worker

E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class Member:
    """One worker."""

    rank: int
    log: MemoryLog
    store: ArenaStore
    model: Model
    worker: Worker
    task: "asyncio.Task[None]"
    life: int = 0

    async def die(self) -> None:
        """End as a killed process does: nothing more is said, and its memory is gone."""
        await self.log.close()
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()
        await self.store.close()


@dataclass(slots=True)
class Cluster:
    """Workers by rank, and what a conductor does."""

    server: MemoryStore
    log: MemoryLog
    graph: ModelGraph
    config: DeploymentConfig
    make_model: Callable[[int, TensorStore], Model]
    members: dict[int, Member] = field(default_factory=dict)
    _admitted: set[str] = field(default_factory=set)

    async def join(self, rank: int) -> Member:
        """Start a rank's worker, and wait until it has joined."""
        log, store = MemoryLog(self.server), open_store(total_bytes=64 << 20)
        model = self.make_model(rank, store)
        seen = len(self.server.records)
        worker = Worker(log, SUBJECTS, self.config, Rank(rank), model, store)
        member = Member(rank, log, store, model, worker, asyncio.create_task(worker.run()))
        async with aclosing(self.log.read([SUBJECTS.worker(rank)], seen + 1)) as records:
            async for record in records:
                if isinstance(decode(record.data), WorkerJoined):
                    member.life = record.seq
                    break
        self.members[rank] = member
        return member

    # ---- orders ------------------------------------------------------------------------------------
    def order(
        self,
        request_id: str,
        *calls: WalkCall,
        step: int = 0,
        attempt: int = 1,
        ends: Sequence[str] = (),
        partition: str = "",
        seed: int = 3,
        ranks: Mapping[str, int] | None = None,
        by_walk: Mapping[str, Mapping[str, int]] | None = None,
        lives: Mapping[int, int] | None = None,
        only: Sequence[int] | None = None,
    ) -> list[NodeReady]:
        """Order a step at all its ranks, or `only` at some.

        `ranks` says where nodes are, `by_walk` where they are in a walk; else it is as configured.
        """
        placement, walk_placement = assign(
            self.config.groups, [group.ranks[0] for group in self.config.groups]
        )
        if ranks is not None:
            placement, walk_placement = placement | dict(ranks), {}
        walk_placement |= {walk: dict(nodes) for walk, nodes in (by_walk or {}).items()}
        having = {
            rank_of(placement, walk_placement, call.name, node)
            for call in calls
            for node in self.graph.walks[call.name].nodes
        }
        known = {rank: member.life for rank, member in self.members.items()} | dict(lives or {})
        orders = [
            NodeReady(
                id=f"{request_id}.ready.{attempt}.{step}.{rank}",
                writer="conductor",
                request_id=request_id,
                attempt=attempt,
                index=step,
                incarnation=known[rank],
                epoch=1,
                rank=rank,
                model=self.config.name,
                walks=list(calls),
                placement=placement,
                walk_placement=walk_placement,
                lives=known,
                partition=partition,
                ends=list(ends),
                origin="g-1",
                seed=seed,
                reason="",
                history=b"",
            )
            for rank in sorted(having if only is None else only)
        ]
        self.admit(request_id)
        for order in orders:
            self.put(SUBJECTS.ready(order.rank, request_id), order)
        return orders

    def admit(self, request_id: str) -> None:
        """Admit a request to all ranks, unless it is: they may write its output."""
        if request_id not in self._admitted:
            self._admitted.add(request_id)
            self.put(SUBJECTS.walk(request_id), admitted(request_id, ranks=self.members))

    def stop(self, orders: Sequence[NodeReady]) -> None:
        """Stop a step everywhere, and cancel its request."""
        self.interrupt(orders)
        request_id = str(orders[0].request_id)
        cancelled = RequestCancelled(
            id=f"{request_id}.end", writer="conductor", request_id=request_id, epoch=1, reason="", history=b""
        )
        self.put(SUBJECTS.walk(request_id), cancelled)

    def interrupt(self, orders: Sequence[NodeReady]) -> None:
        """Stop a step at its ranks; the request goes on, later and maybe elsewhere."""
        for order in orders:
            stop = WalkStop(
                id=f"{order.request_id}.stop.{order.attempt}.{order.index}.{order.rank}",
                writer="conductor",
                request_id=order.request_id,
                attempt=order.attempt,
                index=order.index,
                incarnation=order.incarnation,
                epoch=1,
                rank=order.rank,
                reason="cancelled",
                history=b"",
            )
            self.put(SUBJECTS.ready(order.rank, str(order.request_id)), stop)

    def resume(self, request_id: str, attempt: int) -> None:
        """The request goes on in this attempt, wherever."""
        resumed = RequestResumed(
            id=f"{request_id}.resumed.{attempt}",
            writer="conductor",
            request_id=request_id,
            attempt=attempt,
            epoch=1,
            placement={},
            reason="",
        )
        self.put(SUBJECTS.walk(request_id), resumed)

    def finish(self, request_id: str) -> None:
        """The request is over."""
        finished = RequestFinished(
            id=f"{request_id}.end",
            writer="conductor",
            request_id=request_id,
            epoch=1,
            usage=Usage(),
            finish_reasons=[],
            output=msgspec.convert({}, type(WalkCompleted(rank=0, results=[]).output)),
            history=b"",
        )
        self.put(SUBJECTS.walk(request_id), finished)

    def put(self, subject: str, event: Event) -> None:
        self.server.append(subject, encode(event))

    # ---- what came of them -------------------------------------------------------------------------
    def events(self, kind: type[E], request_id: str | None = None) -> list[E]:
        found: list[AnyEvent] = [decode(record.data) for record in self.server.records]
        return [e for e in found if isinstance(e, kind) and request_id in (None, e.request_id)]

    async def until(
        self, kind: type[E], request_id: str, count: int = 1, *, may_fail: bool = False, **having: Any
    ) -> list[E]:
        """The first `count` such events of a request, once they are stored."""
        found: list[E] = []
        async with asyncio.timeout(30), aclosing(self.log.read(SUBJECTS.all_of(request_id), 1)) as records:
            async for record in records:
                event = decode(record.data)
                # A stop may free a tensor that another rank still reads: the failure of an attempt that was
                # fenced off is void, as it is for the conductor.
                is_void = isinstance(event, WalkFailed) and event.attempt < having.get("attempt", 0)
                assert may_fail or kind is WalkFailed or is_void or not isinstance(event, WalkFailed), event
                if isinstance(event, kind) and all(getattr(event, n) == v for n, v in having.items()):
                    found.append(event)
                if len(found) == count:
                    return found
        raise AssertionError

    async def interrupted(self, request_id: str, count: int) -> None:
        """Wait for the reports of `count` interrupted orders.

        An order may fail instead of being stopped: it read a tensor that another rank's stop had freed. The
        conductor has given the attempt up before, so that failure is void.
        """
        reports = 0
        async with asyncio.timeout(30), aclosing(self.log.read(SUBJECTS.all_of(request_id), 1)) as records:
            async for record in records:
                reports += isinstance(decode(record.data), WalkStopped | WalkFailed)
                if reports == count:
                    return

    async def done(self, request_id: str, ranks: int = 1, **having: Any) -> dict[int, WalkCompleted]:
        """What each of a step's ranks came to."""
        return {e.rank: e for e in await self.until(WalkCompleted, request_id, ranks, **having)}

    def chunks(self, request_id: str) -> list[OutputChunk]:
        return self.events(OutputChunk, request_id)

    def text(self, request_id: str) -> str:
        return "".join(chunk.text for chunk in self.chunks(request_id))

    async def empty(self, *request_ids: str) -> None:
        """End requests, and wait until nothing of them is in any store."""
        for request_id in request_ids:
            self.finish(request_id)
        await until(lambda: not any(m.store.stats().slots for m in self.members.values()))

    @property
    def held(self) -> dict[str, int]:
        """What all ranks together hold now, whoever's it is; nothing, where nothing runs."""
        found = {"slots": 0, "scopes": 0, "early": 0, "running": 0, "waiting": 0, "held": 0, "kv_used": 0}
        for member in self.members.values():
            store, engine = member.store.stats(), member.model.counters()
            found["slots"] += store.slots
            found["scopes"] += store.scopes
            found["early"] += member.worker.vital_signs()["meters"].edges.early
            for name in ("running", "waiting", "held", "kv_used") if engine is not None else ():
                found[name] += getattr(engine, name)
        return {name: count for name, count in found.items() if count}


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - threads make it so, and nobody tells
            await asyncio.sleep(0.001)


@asynccontextmanager
async def clustered(
    graph: ModelGraph,
    config: DeploymentConfig,
    make_model: Callable[[int, TensorStore], Model],
    ranks: Sequence[int] = (0, 1),
) -> AsyncIterator[Cluster]:
    """Workers that have joined; cancelled at the end."""
    server = MemoryStore(SUBJECTS)
    cluster = Cluster(server, MemoryLog(server), graph, config, make_model)
    try:
        for rank in ranks:
            await cluster.join(rank)
        yield cluster
    finally:
        for member in cluster.members.values():
            if not member.task.done():
                member.task.cancel()
                await asyncio.wait([member.task])
            with suppress(Exception):
                await member.log.close()
            await member.store.close()
        await cluster.log.close()
