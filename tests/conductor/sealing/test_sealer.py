"""The sealer of a leading conductor: when it seals, and how another conductor continues."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from conductor.sealing.anchoring import Anchoring
from conductor.sealing.sealer import Sealer
from shared.events import (
    Event,
    LogSealed,
    NodeReady,
    OutputChunk,
    RequestFinished,
    WorkerJoined,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import StoredRecord
from shared.sealing import request_check, seals
from shared.sealing.anchors import Anchor
from shared.sealing.findings import Level, worst
from shared.sealing.keys import SigningKey
from shared.sealing.log_check import LogCheck, LogExtent, LogReport
from shared.sealing.request_check import LogName, RequestReport
from shared.sealing.segment import LogIdentity
from tests.conductor.script import SUBJECTS, completion
from tests.conductor.shell import Watcher, beating, conducting, say, submit, until_it_says

KEY = SigningKey("33" * 32)
NEVER_S = 3600.0


class Shelf:
    """A place for anchors in memory."""

    name = "shelf"

    def __init__(self) -> None:
        self.kept: list[Anchor] = []

    async def put(self, anchor: Anchor) -> None:
        self.kept.append(anchor)

    def last(self, stream: str, created_ns: int) -> Anchor | None:
        return self.kept[-1] if self.kept else None


def sealer(log: MemoryLog, key: SigningKey = KEY, **options: Any) -> Sealer:
    return Sealer(log, SUBJECTS, key, **{"interval_s": NEVER_S, "max_age_s": 3600.0, **options})


@asynccontextmanager
async def serving(store: MemoryStore, name: str = "c1", **options: Any) -> AsyncGenerator[MemoryLog, None]:
    """A conductor that seals, and a worker that beats."""
    log = MemoryLog(store)
    async with (
        conducting(log, name, sealer=sealer(log, **options)),
        beating(log, await joined(log, name)),
    ):
        yield log


async def joined(log: MemoryLog, name: str) -> int:
    """Join as a worker that lives as long as the conductor."""
    event = WorkerJoined(
        id=f"w0-{name}",
        writer="w0",
        rank=0,
        model="demo",
        nodes=["prepare", "llm"],
        device="cpu",
        kv_tokens=128,
    )
    return await say(log, SUBJECTS.worker(0), event)


async def ask(log: MemoryLog, store: MemoryStore, request_id: str) -> Watcher:
    """Have a request served; return a watcher that has read its end."""
    await submit(log, request_id)
    return await work(log, store, request_id)


async def work(log: MemoryLog, store: MemoryStore, request_id: str) -> Watcher:
    """Answer all orders of a request until it ends."""
    watcher = Watcher(store)
    while True:
        event = await watcher.until(Event, lambda one: one.request_id == request_id)
        if isinstance(event, NodeReady):
            await say(log, SUBJECTS.done(0, request_id), completion(event))
        if isinstance(event, RequestFinished):
            return watcher


async def lists(watcher: Watcher, request_id: str) -> seals.Seal:
    """Wait for the seal that lists a request."""
    while True:
        event = await watcher.until(LogSealed)
        found = seals.read(StoredRecord(10**9, SUBJECTS.sealed, encode(event), 0)).seal
        if any(entry.request_id == request_id for entry in found.requests):
            return found


def verified(store: MemoryStore, *keys: SigningKey) -> LogReport:
    own = [record for record in store.records if record.subject == SUBJECTS.sealed]
    extent = LogExtent(
        stream=SUBJECTS.stream,
        created_ns=store.created_ns,
        first_seq=1,
        last_seq=len(store.records),
        now_ns=store.records[-1].time_ns,
    )
    trusted = frozenset(key.public for key in keys or (KEY,))
    check = LogCheck(extent, own, SUBJECTS, trusted=trusted)
    for record in store.records:
        check.take(record)
    return check.report()


def request_report(store: MemoryStore, request_id: str, key: SigningKey = KEY) -> RequestReport:
    own = [record for record in store.records if record.subject == SUBJECTS.sealed]
    name = LogName(stream=SUBJECTS.stream, created_ns=store.created_ns)
    others = [record for record in store.records if record.subject != SUBJECTS.sealed]
    (found,) = request_check.check([request_id], others, own, SUBJECTS, name, trusted=frozenset({key.public}))
    return found


async def test_a_request_is_sealed_when_it_ends() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        watcher = await ask(log, store, "r1")
        seal = await lists(watcher, "r1")
    assert seal.sealed_since == 1
    assert request_report(store, "r1").is_sealed
    assert worst(verified(store).findings) is Level.NOTE


async def test_a_conductor_that_stops_seals_everything() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        await ask(log, store, "r1")
        await say(log, SUBJECTS.output("nats", "r1", "w0"), OutputChunk(id="late", request_id="r1"))
    assert store.records[-1].subject == SUBJECTS.sealed
    assert verified(store).findings == []
    assert request_report(store, "r1").is_sealed


async def test_nothing_new_needs_no_seal() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store, interval_s=0.01) as log:
        watcher = await ask(log, store, "r1")
        await lists(watcher, "r1")
        before = len(store.records)
        for _ in range(20):
            await asyncio.sleep(0.01)
    assert len(store.records) <= before + 1


async def test_a_successor_continues_the_chain_and_lists_an_open_request_as_a_whole() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        await submit(log, "r1")
        await Watcher(store).until(NodeReady)
    first = seals.read(store.records[-1]).seal
    assert first.open_since < first.last_seq
    async with serving(store, "c2") as log:
        seal = await lists(await work(log, store, "r1"), "r1")
    (entry,) = [one for one in seal.requests if one.request_id == "r1"]
    assert entry.first_seq == first.open_since
    assert verified(store).findings == []
    assert request_report(store, "r1").is_sealed


async def test_a_successor_with_another_key_continues_the_chain() -> None:
    store, other = MemoryStore(subjects=SUBJECTS), SigningKey("44" * 32)
    async with serving(store) as log:
        await ask(log, store, "r1")
    async with serving(store, "c2", key=other) as log:
        await ask(log, store, "r2")
    assert verified(store, KEY, other).findings == []
    assert {finding.kind for finding in verified(store, other).findings} == {"unknown_key"}


async def test_an_old_log_is_sealed_from_the_new_epoch_on() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    log = MemoryLog(store)
    async with conducting(log), beating(log, await joined(log, "c1")):
        await ask(log, store, "old")
    async with serving(store, "c2") as log:
        await until_it_says(log, "c2", "leading")
        await ask(log, store, "new")
    (finding,) = verified(store).findings
    assert finding.kind == "older_than_sealing"
    assert request_report(store, "new").is_sealed
    assert not request_report(store, "old").is_sealed


async def test_records_that_are_no_seals_do_not_stop_the_sealer() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        watcher = await ask(log, store, "r1")
        await lists(watcher, "r1")
        store.append(SUBJECTS.sealed, b'{"type":"io.nats.jetstream.api.v1.stream_info_response"}')
        await lists(await ask(log, store, "r2"), "r2")
    assert {finding.kind for finding in verified(store).findings} == {"foreign"}


async def test_sealing_continues_after_all_seals_have_expired() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        await lists(await ask(log, store, "r1"), "r1")
        store.forget(len(store.records))
        await submit(log, "r2")
        await lists(await work(log, store, "r2"), "r2")


async def test_a_nearly_full_log_gets_no_seals() -> None:
    store = MemoryStore(subjects=SUBJECTS)
    async with serving(store) as log:
        watcher = await ask(log, store, "r1")
        await lists(watcher, "r1")
        before = sum(record.subject == SUBJECTS.sealed for record in store.records)
        store.max_bytes = store.nbytes + 10
        await submit(MemoryLog(MemoryStore(subjects=SUBJECTS)), "elsewhere")
    after = sum(record.subject == SUBJECTS.sealed for record in store.records)
    assert after in (before, before + 1)


async def test_anchors_follow_the_seals() -> None:
    store, shelf = MemoryStore(subjects=SUBJECTS), Shelf()
    async with serving(store, anchoring=Anchoring([shelf])) as log:
        await ask(log, store, "r1")
    last = seals.read(store.records[-1])
    assert shelf.kept[-1].chain == last.seal.chain.hex()
    assert shelf.kept[-1].seq == last.seq


async def test_a_log_that_lost_its_anchored_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    anchored = Anchor(stream="S", created_ns=1, seq=9, last_seq=8, last_ns=0, chain="", key="")
    shelf.kept.append(anchored)
    log = LogIdentity(stream="S", created_ns=1, max_age_s=1.0)
    Anchoring([shelf]).check(log, None)
    assert "not the one that was anchored" in caplog.text


async def test_seals_are_read_by_nobody_else() -> None:
    filters = [
        *SUBJECTS.for_worker(0),
        *SUBJECTS.for_gateway("g"),
        *SUBJECTS.for_conductor(),
        *SUBJECTS.replayed("r"),
    ]
    store = MemoryStore(subjects=SUBJECTS)
    store.append(SUBJECTS.sealed, b"")
    log = MemoryLog(store)
    async with aclosing(log.history(filters)) as records:
        assert [record async for record in records] == []
