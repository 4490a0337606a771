"""The process of a tensor-parallel follower: holds a part of a node, computes its leader's steps (ADR 17).

    log ──worker.joined, worker.lost──> is this incarnation still the current one?
    leader ──connects, sends a Greeting──> LeaderListener
    leader ──steps, over this connection──> FollowerEngine, in a separate thread

The process publishes the membership events of any worker (joined, heartbeats, leaving), but reads no orders.
It joins before it loads, because its `worker.joined` contains the endpoint that its leader connects to. It
ends when its leader or another member is gone. Its supervisor restarts it, and the group is gathered again.
"""

import asyncio
import contextlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, Never, Protocol

from configs.deployment import DeploymentConfig
from shared.epoch_fence import EpochFence
from shared.events import MalformedEventError, ProcessEnd, WorkerJoined, WorkerLeaving
from shared.ids import Rank
from shared.log.port import Log
from shared.meters import WorkerMeters
from shared.subject_rules import read_event
from shared.subjects import Subjects
from workers.kv_engine.counters import WorkCounters
from workers.kv_engine.parallel.connection import GroupLostError
from workers.membership.event_writer import EventWriter
from workers.membership.incarnation import FINAL_EVENTS_S, SupersededError, repeat_join, until_cancelled
from workers.orders.inbox import Inbox, IncarnationBegun, IncarnationLost, IncarnationSuperseded
from workers.tensor_parallel.group import ENDPOINT_NAME, GroupMembership, LeaderListener
from workers.threads.owner_thread import OwnerThread

_LOGGER: Final = logging.getLogger(__name__)

DRAIN_S: Final = 8.0
"""The time that a stopping follower still computes: its leader stops concurrently, and ends its steps."""


class FollowerEnginePort(Protocol):
    """The engine that computes a leader's steps (`workers.kv_engine.parallel.follower.FollowerEngine`)."""

    @property
    def kernels(self) -> str: ...
    @property
    def forwards(self) -> int: ...
    def run(self) -> Never: ...


class FollowerProcess:
    """The follower process of one rank.

    `make` makes the engine of this rank's part of the node. It is called in the engine's thread, with the
    group and a callback for the progress of loading, from 0 to 1.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        config: DeploymentConfig,
        rank: Rank,
        make: Callable[[GroupMembership, Callable[[float], None]], FollowerEnginePort],
        *,
        ended: Sequence[ProcessEnd] = (),
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._config = config
        self._rank = rank
        self._make = make
        self._ended = ended
        self._state = "loading"
        self._progress = 0.0
        self._incarnation: int | None = None
        self._engine: FollowerEnginePort | None = None
        self._writer = EventWriter(log, rank)

    async def run(self) -> None:
        """Compute the leader's steps until cancelled; then for at most `DRAIN_S` more, and leave.

        Raises:
            GroupLostError: a member of the group is gone.
            ConfigError, CheckpointError: the model cannot be served.
            SupersededError: another process has taken this rank.
        """
        await until_cancelled(self._work, "follow")

    def vital_signs(self) -> dict[str, Any]:
        """Return the content of a heartbeat. The leader counts the computed tokens, so they are zero here."""
        work = WorkCounters()
        return {
            "state": self._state,
            "progress": self._progress,
            "rank": self._rank,
            "incarnation": self._incarnation,
            "model": self._config.name,
            "pid": os.getpid(),
            "kernels": self._engine.kernels if self._engine is not None else "",
            "steps": self._engine.forwards if self._engine is not None else 0,
            "meters": WorkerMeters(
                log=self._log.stats(),
                sequences=work.sequences,
                computed_tokens=work.computed_tokens,
                sampled_tokens=work.sampled_tokens,
                batch_rows=work.batch_rows,
                step_s=work.step_s,
            ),
        }

    # ---- its incarnations ---------------------------------------------------------------------------------
    async def _work(self, stopping: asyncio.Event) -> None:
        listener = LeaderListener(self._config, self._rank)
        async with asyncio.TaskGroup() as tasks:
            joining = tasks.create_task(self._stay_joined(listener.endpoint), name="incarnations")
            following = tasks.create_task(self._follow(listener), name="follow")
            stop = tasks.create_task(stopping.wait(), name="stopping")
            await asyncio.wait([stop, following], return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._leave(following)
            for task in (joining, following, stop):
                task.cancel()

    async def _stay_joined(self, endpoint: bytes) -> None:
        """Join, and join again whenever the conductor declares this rank lost; the computation continues."""
        while True:
            self._incarnation = None
            start_seq = (await self._log.state()).last_seq + 1
            self._writer = EventWriter(self._log, self._rank)
            joined = self._joined(endpoint)
            inbox = Inbox(
                self._subjects,
                self._rank,
                joined.id,
                earlier_joins=await self._earlier_join_ids(start_seq - 1),
                epoch=(await EpochFence.read(self._log, self._subjects)).epoch,
            )
            await self._writer.post_when_possible(self._subjects.worker(self._rank), joined)
            async with asyncio.TaskGroup() as tasks:
                staying = tasks.create_task(
                    repeat_join(joined, self._writer, self._subjects, lambda: self._incarnation),
                    name="repeat join",
                )
                await self._read_events(inbox, start_seq)
                staying.cancel()

    def _joined(self, endpoint: bytes) -> WorkerJoined:
        return WorkerJoined(
            id=f"{self._writer.name}.joined.{secrets.token_hex(8)}",
            rank=self._rank,
            model=self._config.name,
            nodes=self._config.nodes_of(self._rank),
            device=self._config.device_of(self._rank),
            max_seq_len=self._config.max_seq_len,
            host=platform.node(),
            pid=os.getpid(),
            cards={ENDPOINT_NAME: endpoint},
            ended=list(self._ended),
        )

    async def _follow(self, listener: LeaderListener) -> None:
        """Compute the leader's steps until it is gone."""
        try:
            group = await listener.wait_for_leader()
        finally:
            listener.close()
        thread: OwnerThread[FollowerEnginePort] = OwnerThread(
            "engine", lambda: self._make(group, self._on_progress), lambda engine: engine.run()
        )
        try:
            self._engine = await _unless_lost(thread.start(), group)
            self._progress, self._state = 1.0, "ready" if self._state == "loading" else self._state
            _LOGGER.info("rank %d follows rank %d", self._rank, self._config.tp_group_of(self._rank)[0])
            await thread.wait()
        except GroupLostError:
            if self._state != "draining":
                raise
            _LOGGER.info("rank %d, which leads, has ended", self._config.tp_group_of(self._rank)[0])
        finally:
            group.close()

    def _on_progress(self, share: float) -> None:
        self._progress = share

    async def _read_events(self, inbox: Inbox, start_seq: int) -> None:
        """Read the events of this incarnation; return when it has ended."""
        filters = [self._subjects.worker_any(), *self._subjects.conductor_facts()]
        async with aclosing(self._log.read(filters, start_seq)) as records:
            async for record in records:
                match inbox.fold(record):
                    case IncarnationBegun(incarnation):
                        self._incarnation = self._writer.incarnation = incarnation
                        _LOGGER.info("rank %d joined as incarnation %d", self._rank, incarnation)
                    case IncarnationSuperseded(incarnation):
                        raise SupersededError(self._rank, incarnation, self._incarnation)
                    case IncarnationLost(reason):
                        _LOGGER.warning("the conductor gave this rank up (%s): joining again", reason)
                        return
                    case _:
                        pass

    async def _leave(self, following: "asyncio.Task[None]") -> None:
        """Compute until the leader ends, publish `worker.leaving`, and wait until it is stored."""
        was_ready, self._state = self._state == "ready", "draining"
        if was_ready:
            await asyncio.wait([following], timeout=DRAIN_S)
        if self._incarnation is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_EVENTS_S):
                id_ = f"{self._writer.name}.leaving.{self._incarnation}"
                leaving = WorkerLeaving(id=id_, rank=self._rank)
                await self._writer.post_when_possible(self._subjects.worker(self._rank), leaving)
                await self._log.drain()

    async def _earlier_join_ids(self, end_seq: int) -> list[str]:
        """Return the ids of this rank's `worker.joined` events up to `end_seq`."""
        found: list[str] = []
        async with aclosing(self._log.history([self._subjects.worker(self._rank)], 1, end_seq)) as records:
            async for record in records:
                with contextlib.suppress(MalformedEventError):
                    _, event = read_event(record, self._subjects)
                    if isinstance(event, WorkerJoined):
                        found.append(event.id)
        return found


async def _unless_lost(
    making: Coroutine[Any, Any, FollowerEnginePort], group: GroupMembership
) -> FollowerEnginePort:
    """Wait for the engine, but no longer than all members are connected.

    Raises:
        GroupLostError: a member is gone.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(group.watch())
            made = await making
            watching.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return made
