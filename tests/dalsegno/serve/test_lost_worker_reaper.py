import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from dalsegno.serve.lost_worker_reaper import LostWorker, Reaper, WorkerProcess, follow, reap
from shared.events import EpochOpened, Event, WorkerJoined, WorkerLost, encode
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import Log, LogUnavailableError, StoredRecord
from shared.subjects import Subjects

SUBJECTS = Subjects()
HERE = "this-machine"
STARTED_NS = 1_000
OURS = {0: WorkerProcess(pid=77, since_ns=STARTED_NS)}
LOST_S = 50.0
DUE_S = LOST_S + 3.0


def joined(
    id: str = "a", *, rank: int = 0, pid: int = 77, host: str = HERE, incarnation: int | None = None
) -> WorkerJoined:
    return WorkerJoined(
        id=id, rank=rank, model="m", nodes=[], device="cpu", host=host, pid=pid, incarnation=incarnation
    )


def lost(incarnation: int = 1, *, rank: int = 0, epoch: int = 1) -> WorkerLost:
    return WorkerLost(
        id="l", writer="conductor", epoch=epoch, rank=rank, incarnation=incarnation, reason="unheard"
    )


def folded(*events: Event, time_ns: int = 2_000) -> Reaper:
    """A reaper that has read these, stored at 1, 2, ..., at once."""
    reaper = Reaper(HERE, SUBJECTS)
    for place, event in enumerate(events, start=1):
        subject = SUBJECTS.worker(0) if isinstance(event, WorkerJoined) else SUBJECTS.lost
        reaper.fold(StoredRecord(place, subject, encode(event), time_ns), LOST_S)
    return reaper


def test_who_was_given_up_and_does_not_join_again_is_ended_once_when_its_grace_is_over() -> None:
    reaper = folded(joined(), lost())

    assert reaper.due(OURS, DUE_S - 0.1) == []
    assert reaper.next_s(OURS) == DUE_S
    assert reaper.due(OURS, DUE_S) == [
        LostWorker(0, 77, "it was declared lost (unheard) and did not join again in 3 s")
    ]
    assert reaper.due(OURS, DUE_S + 1) == []
    assert reaper.next_s(OURS) is None


def test_another_ranks_process_says_neither_who_lives_here_nor_who_was_lost() -> None:
    """The key of worker 1 writes of rank 0, on the subject that it may write to."""
    reaper = Reaper(HERE, SUBJECTS)
    for place, event in enumerate((joined(), lost()), start=1):
        reaper.fold(StoredRecord(place, SUBJECTS.worker(1), encode(event), 2_000), LOST_S)
    reaper.fold(StoredRecord(3, SUBJECTS.worker(0), encode(joined("b")), 2_000), LOST_S)
    forged = msgspec.structs.replace(lost(3), writer="w1", epoch=None)
    reaper.fold(StoredRecord(4, SUBJECTS.worker(1), encode(forged), 2_000), LOST_S)

    assert reaper.due(OURS, DUE_S) == []


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([joined()], "it lives"),
        ([joined(), lost(), joined("b")], "it has joined again"),
        ([joined(), joined("b"), lost(1)], "an earlier life of it was given up, late"),
        ([joined(), lost(2)], "another life was given up"),
        ([joined(), lost(rank=1)], "another rank's was"),
        ([joined(pid=78), lost()], "it was another process's"),
        ([joined(host="elsewhere"), lost()], "that process is on another machine"),
        ([joined(rank=1), lost(rank=1)], "that was another rank's process, of the same number"),
        ([EpochOpened(id="e", epoch=2, writer="conductor", conductor="c", core=""), joined(), lost(2)],
         "a deposed conductor said so"),
    ],
)  # fmt: skip
def test_nobody_else_is_ended(events: Sequence[Event], why: str) -> None:
    reaper = folded(*events)

    assert reaper.due(OURS, DUE_S + 100) == [], why
    assert reaper.next_s(OURS) is None


def test_a_copy_of_the_lost_life_is_no_new_one() -> None:
    reaper = folded(joined(), lost(), joined(), joined(incarnation=1))

    assert [condemned.pid for condemned in reaper.due(OURS, DUE_S)] == [77]


def test_a_life_that_says_itself_again_because_the_log_forgot_is_known_by_its_incarnation() -> None:
    reaper = folded(joined(incarnation=1), lost(1))

    assert [condemned.pid for condemned in reaper.due(OURS, DUE_S)] == [77]


def test_a_process_that_has_the_number_of_one_before_it_is_not_taken_for_that() -> None:
    reaper = folded(joined(), lost(), time_ns=STARTED_NS - 1)

    assert reaper.due(OURS, DUE_S) == []


def test_what_cannot_be_read_changes_nothing() -> None:
    reaper = Reaper(HERE, SUBJECTS)
    reaper.fold(StoredRecord(1, SUBJECTS.lost, b"\x00nothing", 0), LOST_S)

    assert reaper.next_s(OURS) is None


async def test_it_follows_the_log_and_ends_who_is_due() -> None:
    server = MemoryStore(SUBJECTS, clock=time.time_ns)
    ended: asyncio.Queue[LostWorker] = asyncio.Queue()
    processes = {0: WorkerProcess(77, time.time_ns())}
    log = MemoryLog(server)
    following = asyncio.create_task(
        follow(log, SUBJECTS, Reaper(HERE, SUBJECTS, grace_s=0.05), lambda: processes, ended.put_nowait)
    )
    for id in "ab":
        server.append(SUBJECTS.worker(0), encode(joined(id)))
    server.append(SUBJECTS.lost, encode(lost(2)))
    assert (await ended.get()).pid == 77
    processes[0] = WorkerProcess(78, time.time_ns())
    server.append(SUBJECTS.worker(0), encode(joined("c", pid=78)))
    server.append(SUBJECTS.lost, encode(lost(4)))
    assert (await ended.get()).pid == 78
    following.cancel()
    await asyncio.wait([following])
    await log.close()


async def test_a_log_that_fails_is_followed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.serve.lost_worker_reaper._AGAIN_S", 0.0)
    server = MemoryStore(SUBJECTS, clock=time.time_ns)
    ended: asyncio.Queue[LostWorker] = asyncio.Queue()
    logs: list[MemoryLog] = []

    async def connect() -> Log:
        if not logs:
            logs.append(MemoryLog(server))
            raise LogUnavailableError("not yet")
        logs.append(MemoryLog(server))
        return logs[-1]

    since_ns = time.time_ns()
    reaping = asyncio.create_task(
        reap(connect, SUBJECTS, HERE, lambda: {0: WorkerProcess(77, since_ns)}, ended.put_nowait, grace_s=0.0)
    )
    async with asyncio.timeout(20):
        while len(logs) < 2:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        await logs[1].close()
        while len(logs) < 3:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        server.append(SUBJECTS.worker(0), encode(joined()))
        server.append(SUBJECTS.lost, encode(lost(1)))
        assert (await ended.get()).rank == 0
    reaping.cancel()
    await asyncio.wait([reaping])
