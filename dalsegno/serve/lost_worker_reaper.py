"""Ends workers that were given up and do not come back: stopped, hung, or cut off for good.

    worker.joined ──> which life a process lives        ─┐
    worker.lost   ──> that life is over                  ├──> a process of ours that has had GRACE_S to join
    the launcher  ──> its processes, and since when     ─┘    again and did not: killed, and started anew

A worker whose life was declared over joins again by itself, as soon as it reads that. One that cannot holds
its rank, its memory and its device, and its supervisor sees a process that runs. So it is ended.

A pid alone tells no process: it comes again, in a container often the same. A life is that of a process only
if it joined, by the log's clock, after the process was started; where that clock is behind by more than a
start takes, nobody is ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeAlias

from shared.epoch_fence import EpochFence
from shared.errors import DalSegnoError
from shared.events import MalformedEventError, WorkerJoined, WorkerLost, decode
from shared.log.port import Log, StoredRecord
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)

GRACE_S: Final = 3.0
"""How long a worker that was given up may take to join again; one that runs takes milliseconds."""
_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker's process, of the launcher's own."""

    pid: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A process that is to be ended."""

    rank: int
    pid: int
    why: str


@dataclass(slots=True)
class _Incarnation:
    """The last life of one process."""

    rank: int
    incarnation: int
    joined_ns: int
    lost_s: float | None = None
    reason: str = ""


class Reaper:
    """Who is to be ended. Pure: records are folded in log order, and time is handed in.

    Args:
        host: this machine's name, as workers on it say it.
    """

    def __init__(self, host: str, *, grace_s: float = GRACE_S) -> None:
        self._host = host
        self._grace_s = grace_s
        self._fence = EpochFence()
        self._known: set[str] = set()
        self._incarnations: dict[int, _Incarnation] = {}  # by pid

    def fold(self, record: StoredRecord, now_s: float) -> None:
        """Take one record, read at `now_s`."""
        try:
            event = decode(record.data)
        except MalformedEventError:
            return  # another's mistake; it changes nothing
        if not self._fence.admits(event):
            return  # of a deposed conductor
        match event:
            case WorkerJoined() if event.host == self._host and event.id not in self._known:
                self._known.add(event.id)
                incarnation = event.incarnation or record.seq
                self._incarnations[event.pid] = _Incarnation(event.rank, incarnation, record.time_ns)
            case WorkerLost():
                for life in self._incarnations.values():
                    is_it = (life.rank, life.incarnation) == (event.rank, event.incarnation)
                    if is_it and life.lost_s is None:
                        life.lost_s, life.reason = now_s, event.reason
            case _:
                pass

    def due(self, processes: Mapping[int, WorkerProcess], now_s: float) -> list[LostWorker]:
        """Whom of these, by rank, to end now; each is said once."""
        found = []
        for rank, pid, life, lost_s in self._lost(processes):
            if now_s >= lost_s + self._grace_s:
                del self._incarnations[pid]
                why = f"it was given up ({life.reason}) and did not join again in {self._grace_s:g} s"
                found.append(LostWorker(rank, pid, why))
        return found

    def next_s(self, processes: Mapping[int, WorkerProcess]) -> float | None:
        """When the next one will be due, if it does not join before."""
        return min((lost_s + self._grace_s for *_, lost_s in self._lost(processes)), default=None)

    def _lost(self, processes: Mapping[int, WorkerProcess]) -> list[tuple[int, int, _Incarnation, float]]:
        return [
            (rank, process.pid, life, life.lost_s)
            for rank, process in processes.items()
            if (life := self._incarnations.get(process.pid)) is not None
            and life.rank == rank
            and life.joined_ns >= process.since_ns
            and life.lost_s is not None
        ]


WorkerProcesses: TypeAlias = Callable[[], Mapping[int, WorkerProcess]]
"""The launcher's workers as they are now, by rank."""
Kill: TypeAlias = Callable[[LostWorker], None]


async def reap(
    connect: Callable[[], Awaitable[Log]],
    subjects: Subjects,
    host: str,
    processes: WorkerProcesses,
    kill: Kill,
    *,
    grace_s: float = GRACE_S,
) -> None:
    """Follow the log, and end who is due, until cancelled. Where the log fails, begin anew."""
    while True:
        try:
            log = await connect()
            try:
                await follow(log, subjects, Reaper(host, grace_s=grace_s), processes, kill)
            finally:
                await log.close()
        except* DalSegnoError as errors:
            _LOGGER.debug("following the workers' lives again: %r", errors.exceptions)
        await asyncio.sleep(_AGAIN_S)


async def follow(
    log: Log, subjects: Subjects, reaper: Reaper, processes: WorkerProcesses, kill: Kill
) -> None:
    """Fold one log's records, and end who is due, until that log fails.

    Raises:
        ExceptionGroup: of the `DalSegnoError` that it failed with.
    """
    news = asyncio.Event()

    async def read() -> None:
        async with aclosing(log.read([subjects.worker_any(), subjects.conductor("*")], 1)) as records:
            async for record in records:
                reaper.fold(record, time.monotonic())
                news.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        while True:
            for condemned in reaper.due(processes(), time.monotonic()):
                kill(condemned)
            next_s = reaper.next_s(processes())
            wait_s = None if next_s is None else max(next_s - time.monotonic(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await news.wait()
            news.clear()
