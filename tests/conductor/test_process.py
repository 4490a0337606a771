"""The conductor's process on a log: claiming, leading, handing over, stepping down."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conductor import epochs, process
from conductor.core import retention
from conductor.core.cluster import Cluster
from conductor.core.react import Deadline
from conductor.core.retention import LIVE
from conductor.snapshots import Snapshots
from conductor.timers import Timers
from models import registry
from shared.events import (
    DeadlinePassed,
    EpochOpened,
    NodeReady,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WorkerJoined,
    WorkerLost,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogState, LogUnavailableError
from shared.meters import ConductorMeters
from tests.conductor.script import SUBJECTS, completion
from tests.conductor.shell import (
    QUICK,
    SLOW,
    Watcher,
    answer,
    beating,
    beats_of,
    conducting,
    join,
    say,
    submit,
    until_it_says,
)

pytestmark = pytest.mark.timeout(20)


async def test_a_request_is_conducted_to_its_end() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        await join(log)
        await submit(log)
        await answer(log, watcher)
        finished = await watcher.until(RequestFinished)
    assert (finished.writer, finished.epoch) == ("conductor", 1)
    numbers = [event.number for event in watcher.seen if isinstance(event, NodeReady | RequestFinished)]
    assert numbers == sorted(set(numbers))


async def test_a_request_that_was_forgotten_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_FORGET_EVERY", 1)
    few = msgspec.structs.replace(LIVE, ended=1, digests=1)
    cluster = Cluster(registry.graph, SUBJECTS, retention=few)
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server), cluster=cluster):
        await join(log)
        for request_id in ("r1", "r2", "r3"):
            await submit(log, request_id)
            await answer(log, watcher)
            await watcher.until(RequestFinished)
        assert "r1" not in cluster.digests
        await submit(log, "r1")
        await say(log, SUBJECTS.request("r1"), b'{"model": "demo", "inputs": {"text": "another"}}')
        rejected = await watcher.until(RequestRejected)
    assert (rejected.request_id, rejected.failure.code) == ("r1", "request_id_conflict")
    orders = [event for event in watcher.seen if isinstance(event, NodeReady) and event.request_id == "r1"]
    assert len(orders) == 2


async def test_what_was_submitted_before_anybody_conducted_is_conducted() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    await join(log)
    await submit(log)
    async with conducting(MemoryLog(server)):
        await answer(log, watcher)
        await watcher.until(RequestFinished)


async def test_a_successor_ends_what_its_predecessor_began() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    await join(log)
    async with conducting(MemoryLog(server), "c1"):
        await submit(log)
        ready = await watcher.until(NodeReady)
    await say(log, SUBJECTS.done(0, "r1"), completion(ready))
    async with conducting(MemoryLog(server), "c2"):
        await answer(log, watcher, orders=1)
        finished = await watcher.until(RequestFinished)
    assert finished.epoch == 2
    assert sum(isinstance(event, RequestAdmitted) for event in watcher.seen) == 1


# ---- who leads -------------------------------------------------------------------------------------
@pytest.mark.slow
async def test_a_second_conductor_follows_while_the_first_is_heard() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server), "c1") as first:
        await watcher.until(EpochOpened)
        async with conducting(MemoryLog(server), "c2") as second:
            await until_it_says(log, "c2", "following", times=20)  # twice as long as is needed for a claim
            await join(log)
            await submit(log)
            await answer(log, watcher)
            finished = await watcher.until(RequestFinished)
            assert (first.leading, second.leading) == (True, False)
    assert finished.epoch == 1


async def test_of_several_that_start_at_once_one_leads() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server), "c1") as c1, conducting(MemoryLog(server), "c2") as c2:
        await watcher.until(EpochOpened)
        await join(log)
        await submit(log)
        await answer(log, watcher)
        await watcher.until(RequestFinished)
        assert c1.leading != c2.leading
    assert sum(isinstance(event, EpochOpened) for event in watcher.seen) == 1


@pytest.mark.slow
async def test_a_follower_claims_when_the_leaders_beats_stop() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    doomed = MemoryLog(server)
    async with conducting(doomed, "c1"):
        await watcher.until(EpochOpened)
        async with conducting(MemoryLog(server), "c2"):
            await until_it_says(log, "c2", "following")
            await doomed.close()
            opened = await watcher.until(EpochOpened)
    assert (opened.conductor, opened.epoch) == ("c2", 2)


@pytest.mark.slow
async def test_a_follower_claims_at_once_when_the_leader_leaves_in_order() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with AsyncExitStack() as leader:
        await leader.enter_async_context(conducting(MemoryLog(server), "c1", SLOW))
        await watcher.until(EpochOpened)
        async with conducting(MemoryLog(server), "c2", SLOW):
            await until_it_says(log, "c2", "following")
            await leader.aclose()
            opened = await watcher.until(EpochOpened)
    assert (opened.conductor, opened.epoch) == ("c2", 2)


async def test_one_that_starts_waits_for_the_answer_of_a_leader_that_is_gone() -> None:
    """Whoever led left an epoch in the log; nobody answers for it."""
    server = MemoryStore(SUBJECTS)
    watcher = Watcher(server)
    async with conducting(MemoryLog(server), "c1"):
        await watcher.until(EpochOpened)
    async with conducting(MemoryLog(server), "c2"):
        opened = await watcher.until(EpochOpened)
    assert (opened.conductor, opened.epoch) == ("c2", 2)


async def test_who_is_alone_need_not_ask() -> None:
    server = MemoryStore(SUBJECTS)
    watcher = Watcher(server)
    async with conducting(MemoryLog(server), "c1"):
        await watcher.until(EpochOpened)
    async with conducting(MemoryLog(server), "c2", SLOW, alone=True):  # whose answer would take 0.5 s
        before_s = time.monotonic()
        await watcher.until(EpochOpened)
        assert time.monotonic() - before_s < 0.4


async def test_one_that_leaves_says_so_last() -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    said: list[str] = []

    async def hear() -> None:
        async with aclosing(beats_of(log, "c1")) as beats:
            async for beat in beats:
                said.append(beat["state"])
                if beat["state"] == "leaving":
                    return

    hearing = asyncio.create_task(hear())
    async with conducting(MemoryLog(server)):
        await Watcher(server).until(EpochOpened)
    await hearing
    assert (said[0], said[-1]) == ("starting", "leaving")


@pytest.mark.slow
async def test_a_claim_that_the_log_does_not_take_is_made_again() -> None:
    server = MemoryStore(SUBJECTS)
    watcher = Watcher(server)
    async with conducting(Refusing(server, once=LogUnavailableError("an election"))):
        opened = await watcher.until(EpochOpened)
    assert opened.epoch == 1


class Refusing(MemoryLog):
    """A log that refuses the first publish."""

    def __init__(self, server: MemoryStore, once: LogUnavailableError) -> None:
        super().__init__(server)
        self.once: LogUnavailableError | None = once

    async def publish(self, *args: Any, **options: Any) -> int:
        if (error := self.once) is not None:
            self.once = None
            raise error
        return await super().publish(*args, **options)


def test_an_epoch_the_log_has_forgotten_is_not_opened_again() -> None:
    young = LogState(first_seq=1, last_seq=40, created_ns=0, messages=40, bytes=1)
    old = LogState(first_seq=9, last_seq=40, created_ns=0, messages=32, bytes=1)
    assert epochs.epoch_after(None, young) == 1
    assert epochs.epoch_after(None, old) == 41


async def test_junk_where_epochs_are_opened_stops_nobody() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    await say(log, SUBJECTS.epoch, b"junk")
    async with conducting(MemoryLog(server)):
        opened = await watcher.until(EpochOpened)
        await join(log)
        await submit(log)
        await answer(log, watcher)
        await watcher.until(RequestFinished)
    assert opened.epoch == 2


async def test_a_malformed_submission_is_rejected_and_the_next_is_served() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        await join(log)
        seq = await say(log, SUBJECTS.request("bad"), b"{}")
        rejected = await watcher.until(RequestRejected)
        await submit(log)
        await answer(log, watcher)
        await watcher.until(RequestFinished)
    assert (rejected.submission_seq, rejected.failure.code) == (seq, "malformed_request")


@pytest.mark.parametrize("beat", [b"", b"junk", b"\xc1", b"\x93\x01\x02\x03", b"\x81\x01\x02"])
async def test_a_beat_that_is_none_stops_nobody(beat: bytes) -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        await join(log)
        await submit(log, "r1")
        await watcher.until(NodeReady)  # so by now it listens
        await log.send_heartbeat(SUBJECTS.heartbeat("conductor", "other"), beat)
        await submit(log, "r2")
        await watcher.until(NodeReady, lambda event: event.request_id == "r2")
        await submit(log, "r3")
        await watcher.until(NodeReady, lambda event: event.request_id == "r3")


async def test_its_beats_count_what_it_folded_and_decided() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with (
        aclosing(MemoryLog(server).listen(SUBJECTS.heartbeats())) as beats,
        conducting(MemoryLog(server)),
    ):
        await join(log)
        await submit(log)
        await watcher.until(NodeReady)
        async for _, data in beats:
            meters = msgspec.convert(msgspec.msgpack.decode(data)["meters"], ConductorMeters)
            if meters.decisions == 2 and meters.log.publish_ack_s.count == 3:
                break

    assert meters.folded >= 3  # its epoch, the worker, the request


# ---- who is lost -----------------------------------------------------------------------------------
@pytest.mark.slow
async def test_a_worker_that_falls_silent_is_declared_lost_once() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        life = await join(log)
        async with beating(log, life):
            await until_it_says(log, "c1", "leading", times=20)  # more than three times the silence
        lost = await watcher.until(WorkerLost)
        await until_it_says(log, "c1", "leading", times=20)
    assert (lost.id, lost.rank, lost.incarnation) == (f"worker.0.{life}.lost", 0, life)
    assert (lost.writer, lost.epoch) == ("conductor", 1)
    assert [record.subject for record in server.records].count(SUBJECTS.lost) == 1


@pytest.mark.slow
async def test_one_that_gets_no_further_is_declared_lost() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    recovery = msgspec.structs.replace(QUICK, worker_hung_s=0.5)
    async with conducting(MemoryLog(server), recovery=recovery):
        life = await join(log)
        async with beating(log, life, running=1, steps=3):
            lost = await watcher.until(WorkerLost)
    assert lost.reason.startswith("has work, but made no progress for ")


@pytest.mark.slow
async def test_a_follower_declares_nobody_and_misses_nobody_once_it_leads() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with AsyncExitStack() as leader:
        await leader.enter_async_context(conducting(MemoryLog(server), "c1", SLOW))
        life = await join(log)
        async with beating(log, life), conducting(MemoryLog(server), "c3"):
            await until_it_says(log, "c3", "following", times=20)
            await leader.aclose()
            await until_it_says(log, "c3", "leading", times=5)  # less than the silence
        assert not any(record.subject == SUBJECTS.lost for record in server.records)
        await watcher.until(EpochOpened, lambda event: event.conductor == "c3")


class Electing(MemoryLog):
    """A log whose beats pass, and that does not answer while it has no leader."""

    has_leader = True

    async def state(self) -> LogState:
        if not self.has_leader:
            raise LogUnavailableError("no leader")
        return await super().state()


@pytest.mark.slow
async def test_nobody_is_lost_while_the_log_elects_a_leader() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    electing = Electing(server)
    async with conducting(electing):
        life = await join(log)
        await watcher.until(WorkerJoined)
        electing.has_leader = False
        await until_it_says(log, "c1", "leading", times=40)  # six times the silence
        assert not any(record.subject == SUBJECTS.lost for record in server.records)
        electing.has_leader = True
        lost = await watcher.until(WorkerLost)
    assert lost.incarnation == life


# ---- time limits -----------------------------------------------------------------------------------
@pytest.mark.slow
async def test_a_request_whose_time_is_over_fails() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        await submit(log, timeout_s=0.3)
        passed = await watcher.until(DeadlinePassed)
        failed = await watcher.until(RequestFailed)
    submitted, *_, end = [record for record in server.records if record.subject.endswith(".r1")]
    assert passed.deadline_ns == submitted.time_ns + 300_000_000 <= end.time_ns
    assert (failed.failure.code, failed.failure.status) == ("deadline_exceeded", 504)


@pytest.mark.slow
async def test_a_limit_that_is_far_away_is_looked_at_only_when_something_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class Counted(Timers):
        def due(self, deadlines: Iterable[Deadline], now_s: float) -> list[Deadline]:
            nonlocal looks
            looks += 1
            return super().due(deadlines, now_s)

    monkeypatch.setattr(process, "Timers", Counted)
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        life = await join(log)
        await submit(log, timeout_s=600)
        await watcher.until(NodeReady)
        async with beating(log, life):
            folded = (await until_it_says(log, "c1", "leading", times=40))["meters"]["folded"]
    assert 0 < looks <= folded


@pytest.mark.slow
async def test_one_that_the_log_stored_too_early_is_said_again() -> None:
    """The log's clock goes back by 0.4 s, once: what is said then counts for nothing."""
    behind_ns = 0
    server = MemoryStore(SUBJECTS, clock=lambda: time.time_ns() - behind_ns)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)):
        await submit(log, timeout_s=0.3)
        behind_ns = 400_000_000
        early = await watcher.until(DeadlinePassed)
        passed = await watcher.until(DeadlinePassed)
        await watcher.until(RequestFailed)
    at_ns = [record.time_ns for record in server.records if b"deadline.passed" in record.data]
    assert early.id != passed.id
    assert at_ns[0] < early.deadline_ns == passed.deadline_ns <= at_ns[1]


# ---- snapshots -------------------------------------------------------------------------------------
async def folded_until_it_leads(log: MemoryLog, name: str) -> int:
    """How many events a conductor has read when it first leads."""
    return int((await until_it_says(log, name, "leading"))["meters"]["folded"])


async def test_one_that_ends_in_order_leaves_what_it_knows_to_the_next(tmp_path: Path) -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    snapshots = Snapshots(tmp_path, fold_digest="f")
    async with conducting(MemoryLog(server), "c1", snapshots=snapshots):
        await join(log)
        await submit(log)
        ready = await watcher.until(NodeReady)
    known = len(server.records)
    cluster = await snapshots.read(log, registry.graph, SUBJECTS)
    assert cluster is not None
    async with conducting(MemoryLog(server), "c2", cluster=cluster):
        assert await folded_until_it_leads(log, "c2") <= len(server.records) - known < known
        await say(log, SUBJECTS.done(0, "r1"), completion(ready))
        await answer(log, watcher, orders=1)
        await watcher.until(RequestFinished)


async def test_one_is_written_every_so_many_events(tmp_path: Path) -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    snapshots = Snapshots(tmp_path, fold_digest="f")
    doomed = MemoryLog(server)
    recovery = msgspec.structs.replace(QUICK, snapshot_every=3)
    async with conducting(doomed, snapshots=snapshots, recovery=recovery):
        await join(log)
        await submit(log)
        await watcher.until(NodeReady)
        async with aclosing(beats_of(log, "c1")) as beats:
            async for _ in beats:
                if snapshots.path.exists():
                    break
        await doomed.close()  # killed: it writes nothing more
    cluster = await snapshots.read(log, registry.graph, SUBJECTS)
    assert cluster is not None
    assert cluster.seq >= 3


@pytest.mark.slow
async def test_a_follower_writes_none(tmp_path: Path) -> None:
    server = MemoryStore(SUBJECTS)
    log = MemoryLog(server)
    snapshots = Snapshots(tmp_path, fold_digest="f")
    recovery = msgspec.structs.replace(QUICK, snapshot_every=1)
    async with conducting(MemoryLog(server), "c1"):
        await until_it_says(log, "c1", "leading")
        async with conducting(MemoryLog(server), "c2", snapshots=snapshots, recovery=recovery):
            await join(log)
            await until_it_says(log, "c2", "following", times=5)
    assert not snapshots.path.exists()


# ---- a log that fills up ---------------------------------------------------------------------------
async def test_in_the_last_of_the_logs_room_what_runs_ends_and_nothing_is_admitted() -> None:
    server = MemoryStore(SUBJECTS)
    log, watcher = MemoryLog(server), Watcher(server)
    async with conducting(MemoryLog(server)) as conductor:
        await join(log)
        await submit(log, "r1")
        await watcher.until(RequestAdmitted)
        server.append(SUBJECTS.control("r0"), bytes(100_000))
        server.max_bytes = round(1.9 * server.nbytes)
        await conductor._capacity.poll()
        await submit(log, "r2")
        await answer(log, watcher)
        await watcher.until(RequestFinished)
        while conductor._cluster.seq < len(server.records):  # noqa: ASYNC110 - reading sets no event
            await asyncio.sleep(0)
        admitted = [event.request_id for event in watcher.seen if isinstance(event, RequestAdmitted)]
        waiting = list(conductor._cluster.waiting)

        server.max_bytes = None
        await conductor._capacity.poll()  # and nobody writes anything
        then = await watcher.until(RequestAdmitted)

    assert (admitted, waiting, then.request_id) == (["r1"], ["r2"], "r2")
