"""Ends worker processes that were declared lost and do not join again: stopped, hung, or cut off for good.

    worker.joined ──> the incarnation of each process     ─┐
    worker.lost   ──> that incarnation is over             ├──> a process of ours that did not join again
    within the launcher  ──> its processes, and their start times ─┘    GRACE_S: killed, and restarted

A lost worker joins again by itself as soon as it reads `worker.lost`. One that cannot keeps its rank, memory
and device occupied, and its supervisor sees a running process. So it is killed.

A pid alone does not identify a process: pids are reused, in a container often at once. An incarnation belongs
to a process only if it joined, by the log's clock, after the process was started; if that clock lags by more
than a start takes, nothing is killed.
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
from shared.events import MalformedEventError, WorkerJoined, WorkerLost
from shared.log.port import Log, StoredRecord
from shared.subject_rules import read_event
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)

GRACE_S: Final = 3.0
"""Seconds that a lost worker may take to join again; a working one takes milliseconds."""
_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process of the launcher."""

    pid: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker process to be killed."""

    rank: int
    pid: int
    why: str


@dataclass(slots=True)
class _Incarnation:
    """The latest incarnation of one process."""

    rank: int
    incarnation: int
    joined_ns: int
    lost_s: float | None = None
    reason: str = ""


class Reaper:
    """The decision which processes to kill. Pure: records are folded in log order, and time is passed in.

    Args:
        host: this machine's name, as its workers report it.
    """

    def __init__(self, host: str, subjects: Subjects, *, grace_s: float = GRACE_S) -> None:
        self._host = host
        self._subjects = subjects
        self._grace_s = grace_s
        self._fence = EpochFence()
        self._known: set[str] = set()
        self._incarnations: dict[int, _Incarnation] = {}  # by pid

    def fold(self, record: StoredRecord, now_s: float) -> None:
        """Fold one record, read at `now_s`."""
        try:
            _, event = read_event(record, self._subjects)
        except MalformedEventError:
            return  # malformed: ignored by every reader
        if not self._fence.admits(event):
            return  # from a deposed conductor
        match event:
            case WorkerJoined() if event.host == self._host and event.id not in self._known:
                self._known.add(event.id)
                incarnation = event.incarnation or record.seq
                self._incarnations[event.pid] = _Incarnation(event.rank, incarnation, record.time_ns)
            case WorkerLost():
                for one in self._incarnations.values():
                    is_it = (one.rank, one.incarnation) == (event.rank, event.incarnation)
                    if is_it and one.lost_s is None:
                        one.lost_s, one.reason = now_s, event.reason
            case _:
                pass

    def due(self, processes: Mapping[int, WorkerProcess], now_s: float) -> list[LostWorker]:
        """Return the processes to kill now, each once."""
        found = []
        for rank, pid, incarnation, lost_s in self._lost(processes):
            if now_s >= lost_s + self._grace_s:
                del self._incarnations[pid]
                reason = f"it was declared lost ({incarnation.reason})"
                why = f"{reason} and did not join again in {self._grace_s:g} s"
                found.append(LostWorker(rank, pid, why))
        return found

    def next_s(self, processes: Mapping[int, WorkerProcess]) -> float | None:
        """The time at which the next process will be due, unless it joins before."""
        return min((lost_s + self._grace_s for *_, lost_s in self._lost(processes)), default=None)

    def _lost(self, processes: Mapping[int, WorkerProcess]) -> list[tuple[int, int, _Incarnation, float]]:
        return [
            (rank, process.pid, incarnation, incarnation.lost_s)
            for rank, process in processes.items()
            if (incarnation := self._incarnations.get(process.pid)) is not None
            and incarnation.rank == rank
            and incarnation.joined_ns >= process.since_ns
            and incarnation.lost_s is not None
        ]


WorkerProcesses: TypeAlias = Callable[[], Mapping[int, WorkerProcess]]
"""Returns the launcher's running workers, by rank."""
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
    """Follow the log and kill processes that are due, until cancelled. After a log failure, start again."""
    while True:
        try:
            log = await connect()
            try:
                await follow(log, subjects, Reaper(host, subjects, grace_s=grace_s), processes, kill)
            finally:
                await log.close()
        except* DalSegnoError as errors:
            _LOGGER.debug("following the workers' incarnations again: %r", errors.exceptions)
        await asyncio.sleep(_AGAIN_S)


async def follow(
    log: Log, subjects: Subjects, reaper: Reaper, processes: WorkerProcesses, kill: Kill
) -> None:
    """Fold one log's records, and kill processes that are due, until that log fails.

    Raises:
        ExceptionGroup: of the log's `DalSegnoError`.
    """
    news = asyncio.Event()

    async def read() -> None:
        async with aclosing(log.read([subjects.worker_any(), *subjects.conductor_facts()], 1)) as records:
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
