"""The process of a rank that follows: it has a part of a node, and computes what its leader says (ADR 17).

    log ──worker.joined, worker.lost──> is this life still the rank's own?
    leader ──greeting──> LeaderListener ──steps──> FollowerEngine, in a thread of its own

It lives on the log as any worker does (joined, beats, leaving), and reads no orders there. It joins before it
loads: its leader finds it so. When the leader is gone, or another member, it ends: its supervisor starts it
again, and the copy is gathered anew.
"""

import asyncio
import contextlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from threading import Thread
from typing import Any, Final, Never, Protocol

from configs.deployment import DeploymentConfig
from shared.epoch_fence import EpochFence
from shared.events import MalformedEventError, WorkerJoined, WorkerLeaving, decode
from shared.ids import Rank
from shared.log.port import Log
from shared.meters import WorkerMeters
from shared.subjects import Subjects
from workers.kv_engine.counters import WorkCounters
from workers.kv_engine.parallel.connection import GroupLostError
from workers.membership.event_writer import EventWriter
from workers.membership.incarnation import FINAL_EVENTS_S, SupersededError, repeat_join, until_cancelled
from workers.orders.inbox import Inbox, IncarnationBegun, IncarnationLost, IncarnationSuperseded
from workers.tensor_parallel.group import ENDPOINT_NAME, GroupMembership, LeaderListener

_LOGGER: Final = logging.getLogger(__name__)

FAREWELL_S: Final = 8.0
"""Told to stop, it computes on for so long: its leader is told at the same time, and finishes what runs."""


class FollowerEnginePort(Protocol):
    """What computes (`workers.kv_engine.parallel.follower.FollowerEngine`)."""

    @property
    def kernels(self) -> str: ...
    @property
    def forwards(self) -> int: ...
    def run(self) -> Never: ...


class FollowerProcess:
    """One process of a rank that follows.

    Args:
        make: makes the engine of this rank's part; called in its thread, told a member's view of the copy
            and whom to tell how much is loaded, from 0 to 1.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        config: DeploymentConfig,
        rank: Rank,
        make: Callable[[GroupMembership, Callable[[float], None]], FollowerEnginePort],
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._config = config
        self._rank = rank
        self._make = make
        self._state = "loading"
        self._progress = 0.0
        self._incarnation: int | None = None
        self._engine: FollowerEnginePort | None = None
        self._writer = EventWriter(log, rank)

    async def run(self) -> None:
        """Follow until cancelled; then until the leader has ended, for a while, and leave.

        Raises:
            GroupLostError: a member is gone.
            ConfigError, CheckpointError: what is to be served cannot be.
            SupersededError: another process has taken this rank.
        """
        await until_cancelled(self._work, "follow")

    def vital_signs(self) -> dict[str, Any]:
        """How it is, as its beats tell; what is computed, its leader counts."""
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

    # ---- its lives ---------------------------------------------------------------------------------
    async def _work(self, stopping: asyncio.Event) -> None:
        listener = LeaderListener(self._config, self._rank)
        async with asyncio.TaskGroup() as tasks:
            living = tasks.create_task(self._live(listener.endpoint), name="lives")
            following = tasks.create_task(self._follow(listener), name="follow")
            stop = tasks.create_task(stopping.wait(), name="stopping")
            await asyncio.wait([stop, following], return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._leave(following)
            for task in (living, following, stop):
                task.cancel()

    async def _live(self, endpoint: bytes) -> None:
        """Be known on the log. One that is given up joins again: what it computes does not depend on it."""
        while True:
            self._incarnation = None
            start_seq = (await self._log.state()).last_seq + 1
            self._writer = EventWriter(self._log, self._rank)
            joined = self._joined(endpoint)
            inbox = Inbox(
                self._subjects,
                self._rank,
                joined.id,
                earlier_lives=await self._earlier(start_seq - 1),
                epoch=EpochFence.behind(await self._log.last(self._subjects.epoch)).epoch,
            )
            await self._writer.post_when_possible(self._subjects.worker(self._rank), joined)
            async with asyncio.TaskGroup() as tasks:
                staying = tasks.create_task(
                    repeat_join(joined, self._writer, self._subjects, lambda: self._incarnation),
                    name="stay known",
                )
                await self._read(inbox, start_seq)
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
        )

    async def _follow(self, listener: LeaderListener) -> None:
        """Compute what the leader says, until it is gone."""
        try:
            copy = await listener.leader()
        finally:
            listener.close()
        thread = _EngineThread(self._make, copy, self._on_progress)
        try:
            self._engine = await _unless_lost(thread.made(), copy)
            self._progress, self._state = 1.0, "ready" if self._state == "loading" else self._state
            _LOGGER.info("rank %d follows rank %d", self._rank, self._config.copy_of(self._rank)[0])
            await thread.ended()
        except GroupLostError:
            if self._state != "draining":
                raise
            _LOGGER.info("rank %d, which leads, has ended", self._config.copy_of(self._rank)[0])
        finally:
            copy.close()

    def _on_progress(self, share: float) -> None:
        self._progress = share

    async def _read(self, inbox: Inbox, start_seq: int) -> None:
        """Learn of the own life; return when it is over."""
        filters = [self._subjects.worker_any(), self._subjects.conductor("*")]
        async with aclosing(self._log.read(filters, start_seq)) as records:
            async for record in records:
                match inbox.fold(record):
                    case IncarnationBegun(incarnation):
                        self._incarnation = self._writer.incarnation = incarnation
                        _LOGGER.info("rank %d joined as incarnation %d", self._rank, incarnation)
                    case IncarnationSuperseded(incarnation):
                        raise SupersededError(self._rank, incarnation, self._incarnation)
                    case IncarnationLost(reason):
                        _LOGGER.warning("given up by the conductor (%s): joining again", reason)
                        return
                    case _:
                        pass

    async def _leave(self, following: "asyncio.Task[None]") -> None:
        """Follow to the leader's end, say good-bye, and see that it is stored."""
        was_ready, self._state = self._state == "ready", "draining"
        if was_ready:
            await asyncio.wait([following], timeout=FAREWELL_S)
        if self._incarnation is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_EVENTS_S):
                id_ = f"{self._writer.name}.leaving.{self._incarnation}"
                leaving = WorkerLeaving(id=id_, rank=self._rank)
                await self._writer.post_when_possible(self._subjects.worker(self._rank), leaving)
                await self._log.drain()

    async def _earlier(self, end_seq: int) -> list[str]:
        """The ids of this rank's lives so far."""
        found: list[str] = []
        async with aclosing(self._log.history([self._subjects.worker(self._rank)], 1, end_seq)) as records:
            async for record in records:
                with contextlib.suppress(MalformedEventError):
                    event = decode(record.data)
                    if isinstance(event, WorkerJoined):
                        found.append(event.id)
        return found


async def _unless_lost(
    making: Coroutine[Any, Any, FollowerEnginePort], copy: GroupMembership
) -> FollowerEnginePort:
    """What is made, unless a member is gone before: who waits for that one waits long.

    Raises:
        GroupLostError: it is.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(copy.watch())
            made = await making
            watching.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return made


class _EngineThread:
    """The thread in which a follower's engine is made and runs; it ends with its lines, or the process."""

    def __init__(
        self,
        make: Callable[[GroupMembership, Callable[[float], None]], FollowerEnginePort],
        copy: GroupMembership,
        on_progress: Callable[[float], None],
    ) -> None:
        self._make = make
        self._copy = copy
        self._on_progress = on_progress
        # Errors are results here: one that comes when nobody waits any more is nobody's, and no complaint.
        self._made: Future[FollowerEnginePort | BaseException] = Future()
        self._ended: Future[BaseException] = Future()
        Thread(target=self._run, name="engine", daemon=True).start()

    async def made(self) -> FollowerEnginePort:
        """Wait for the engine; what making it raises is raised here."""
        made = await asyncio.shield(asyncio.wrap_future(self._made))
        if isinstance(made, BaseException):
            raise made
        return made

    async def ended(self) -> Never:
        """Wait for its end, and raise what of."""
        raise await asyncio.shield(asyncio.wrap_future(self._ended))

    def _run(self) -> None:
        try:
            engine = self._make(self._copy, self._on_progress)
        except BaseException as error:  # noqa: BLE001 - raised again by `made`
            self._made.set_result(error)
            return
        self._made.set_result(engine)
        try:
            engine.run()
        except BaseException as error:  # noqa: BLE001 - raised again by `ended`
            self._ended.set_result(error)
