"""What an index says of a log is what a reader of the whole log says, whatever happened to either."""

import asyncio
import fcntl
import os
import shutil
import stat
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dalsegno.history import index_store, request_index
from dalsegno.history.index_store import Fold, IndexStore, LogName
from dalsegno.history.request_index import IndexedRequests, ListedRequests, between, opened_requests
from dalsegno.history.summary import Summary
from dalsegno.history.summary_fold import summaries
from shared.log.memory import MemoryLog
from shared.log.port import LogState, MissingRecords, StoredRecord
from tests.conductor.script import SUBJECTS
from tests.dalsegno.history.odd_log import OddLog


def told(found: Sequence[Summary]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(one) for one in found]


async def read(odd: OddLog) -> list[dict[str, Any]]:
    """What a reader of the whole log says, oldest first."""
    return told(await summaries(odd.log, SUBJECTS))


async def indexed(odd: OddLog, folder: Path | None, kind: type = IndexedRequests) -> list[dict[str, Any]]:
    async with opened_requests(odd.log, SUBJECTS, folder) as requests:
        assert isinstance(requests, kind)
        found = told(list(requests.newest())[::-1])
        assert len(requests) == len(found)
        return found


@pytest.fixture
def odd() -> OddLog:
    log = OddLog(1)
    log.grow(400)
    return log


@pytest.mark.parametrize("seed", range(40))
async def test_the_answers_are_those_of_a_reader_of_the_whole_log(tmp_path: Path, seed: int) -> None:
    odd = OddLog(seed)
    for _ in range(12):
        odd.grow(odd.random.randrange(60))
        if odd.random.random() < 0.5:
            odd.store.forget(odd.random.randrange(odd.store.forgotten, len(odd.store.records) + 1))
        assert await indexed(odd, tmp_path) == await read(odd)


async def test_what_was_folded_is_not_read_again(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await indexed(odd, tmp_path)
    folded = len(odd.store.records)
    odd.grow(10)
    starts: list[int] = []
    history = MemoryLog.history

    def observed(
        self: MemoryLog, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        starts.append(start_seq)
        return history(self, subjects, start_seq, end_seq)

    monkeypatch.setattr(MemoryLog, "history", observed)
    found = await indexed(odd, tmp_path)
    assert len(starts) == 1
    assert folded - 2 <= starts[0] <= folded, "the last record, by which the log is recognised"
    assert found == await read(odd)


async def test_a_log_of_many_batches_is_indexed_whole(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_index, "_BATCH", 7)
    assert await indexed(odd, tmp_path) == await read(odd)


async def test_requests_of_a_time_range_are_given_oldest_first(odd: OddLog, tmp_path: Path) -> None:
    everything = await summaries(odd.log, SUBJECTS)
    since, until = everything[2].start_ns, everything[6].start_ns
    async with opened_requests(odd.log, SUBJECTS, tmp_path) as requests:
        assert told(between(requests, since, until)) == told(everything[2:6])
    async with opened_requests(odd.log, SUBJECTS, None) as requests:
        assert told(between(requests, since, until)) == told(everything[2:6])


# ---- other logs ------------------------------------------------------------------------------------------


async def test_the_index_of_a_log_that_was_recreated_is_thrown_away(odd: OddLog, tmp_path: Path) -> None:
    await indexed(odd, tmp_path)
    odd.store.recreate()
    assert await indexed(odd, tmp_path) == []
    odd.grow(500)
    assert await indexed(odd, tmp_path) == await read(odd)


@pytest.mark.parametrize("grown", [0, 10, 100])
async def test_the_index_of_a_log_that_was_restored_is_thrown_away(
    odd: OddLog, tmp_path: Path, grown: int
) -> None:
    """The copy was made earlier, and other records followed it: as many, fewer or more."""
    backup = list(odd.store.records)
    odd.grow(50)
    await indexed(odd, tmp_path)
    odd.store.records[:] = backup
    odd.grow(grown)
    assert await indexed(odd, tmp_path) == await read(odd)


async def test_a_log_that_lost_records_is_read_itself(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await indexed(odd, tmp_path)
    del odd.store.records[100:200]
    state = MemoryLog.state

    async def damaged(self: MemoryLog) -> LogState:
        found = await state(self)
        return LogState(
            first_seq=found.first_seq,
            last_seq=400,
            created_ns=found.created_ns,
            messages=found.messages,
            bytes=found.bytes,
            missing=(MissingRecords(101, 200, "2.blk is missing"),),
        )

    monkeypatch.setattr(MemoryLog, "state", damaged)
    assert await indexed(odd, tmp_path, ListedRequests) == await read(odd)


# ---- a damaged index -------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damages(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way to damage an index: what is done, and how."""
    whole = files(folder)

    def flipped(name: str, at: int) -> None:
        data = bytearray(whole[name])
        data[at] ^= 0xFF
        (folder / name).write_bytes(data)

    def made_a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    for name, data in whole.items():
        path = folder / name
        yield f"{name} is removed", path.unlink
        yield f"{name} is empty", partial(path.write_bytes, b"")
        yield f"{name} is junk", partial(path.write_bytes, b"junk" * 1000)
        yield f"{name} is cut off", partial(path.write_bytes, data[: len(data) // 2])
        yield f"{name} has a tail", partial(path.write_bytes, data + bytes(4096))
        yield f"{name} is a folder", partial(made_a_folder, path)
        for at in range(0, len(data), max(1, len(data) // 40)):
            yield f"byte {at} of {name} is another", partial(flipped, name, at)
    yield "all is removed", partial(shutil.rmtree, folder)


@pytest.mark.slow
async def test_a_damaged_index_changes_no_answer(tmp_path: Path) -> None:
    odd, folder = OddLog(2), tmp_path / "index"
    odd.grow(120)
    await indexed(odd, folder)
    odd.grow(3)
    wanted = await read(odd)
    whole = files(folder)
    done = 0
    for what, damage in list(damages(folder)):
        shutil.rmtree(folder)
        folder.mkdir()
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        damage()
        assert await indexed(odd, folder, object) == wanted, what
        done += 1
    assert done > 100


async def test_rows_that_were_changed_with_tools_change_no_answer(odd: OddLog, tmp_path: Path) -> None:
    wanted = await indexed(odd, tmp_path)
    seal = (tmp_path / "seal.json").read_bytes()
    async with index_store.lock(tmp_path):
        store = IndexStore(tmp_path, msgspec.json.decode(seal.splitlines()[0], type=index_store._Seal).log)
        store._database.execute("DELETE FROM requests WHERE seq % 2 = 0")
        store.close()
    assert (tmp_path / "seal.json").read_bytes() == seal
    assert await indexed(odd, tmp_path) == wanted


async def test_an_index_is_of_one_stream_and_one_creation_of_it(odd: OddLog, tmp_path: Path) -> None:
    await indexed(odd, tmp_path)
    own = LogName(SUBJECTS.stream, odd.store.created_ns)
    for other in (LogName("OTHER_LOG", own.created_ns), LogName(own.stream, own.created_ns + 1)):
        kept = files(tmp_path)
        store = IndexStore(tmp_path, other)
        assert (store.fold, store.count()) == (Fold(), 0)
        store.close()
        for name, data in kept.items():
            (tmp_path / name).write_bytes(data)
    store = IndexStore(tmp_path, own)
    assert store.count() == len(await read(odd))
    store.close()


async def test_the_parts_of_two_indices_are_no_index(odd: OddLog, tmp_path: Path) -> None:
    await indexed(odd, tmp_path)
    older = (tmp_path / "seal.json").read_bytes()
    odd.grow(50)
    wanted = await indexed(odd, tmp_path)
    (tmp_path / "seal.json").write_bytes(older)
    assert await indexed(odd, tmp_path) == wanted


async def test_an_index_of_other_code_is_made_again(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(index_store, "_FORM", 0)
        older.setattr(Summary, "take", lambda *_: None)
        wrong = await indexed(odd, tmp_path)
    assert await indexed(odd, tmp_path) == await read(odd) != wrong


# ---- crashes and concurrent commands -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["write", "expire", "seal"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_command_that_was_killed_leaves_nothing_wrong(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, moment: str
) -> None:
    await indexed(odd, tmp_path)
    odd.grow(100)
    odd.store.forget(50)
    original = getattr(IndexStore, method)

    def killed(self: IndexStore, *args: object) -> None:
        if moment == "after":
            original(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(request_index, "_BATCH", 10)
        patch.setattr(IndexStore, method, killed)
        with pytest.raises(KeyboardInterrupt):
            await indexed(odd, tmp_path)
    assert await indexed(odd, tmp_path) == await read(odd)


async def test_two_commands_at_once_wait_for_one_another(odd: OddLog, tmp_path: Path) -> None:
    wanted = await read(odd)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(indexed(odd, tmp_path)) for _ in range(4)]
    assert [task.result() for task in tasks] == [wanted] * 4


async def test_while_another_command_has_the_index_the_log_is_read(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_store, "_LOCK_PATIENCE_S", 0.0)
    await indexed(odd, tmp_path)
    with (tmp_path / "lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        odd.grow(20)
        before = files(tmp_path)
        assert await indexed(odd, tmp_path, ListedRequests) == await read(odd)
        assert files(tmp_path) == before
    assert await indexed(odd, tmp_path) == await read(odd)


async def test_an_index_that_was_removed_while_it_was_made_is_not_sealed(
    odd: OddLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command has made its own in the same place meanwhile, and was killed."""
    write = IndexStore.write

    def replaced(self: IndexStore, *args: Any) -> None:
        write(self, *args)
        monkeypatch.setattr(IndexStore, "write", write)
        index_store.discard(tmp_path)
        IndexStore(tmp_path, self._log).close()

    monkeypatch.setattr(IndexStore, "write", replaced)
    assert await indexed(odd, tmp_path) == await read(odd)
    assert await indexed(odd, tmp_path) == await read(odd)


async def test_where_no_index_can_be_the_log_is_read(odd: OddLog, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file", tmp_path / "file" / "index", Path("/proc/nowhere")):
        assert await indexed(odd, folder, ListedRequests) == await read(odd)


# ---- contents --------------------------------------------------------------------------------------------


async def test_an_index_is_for_its_owner_alone_and_has_no_prompts(odd: OddLog, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    umask = os.umask(0)
    try:
        await indexed(odd, folder)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == dict.fromkeys(("lock", "requests.sqlite", "seal.json"), 0o600)
    assert b"demo" in (folder / "requests.sqlite").read_bytes()
    assert all(b"a prompt" not in data for data in files(folder).values())


async def test_nothing_of_an_expired_request_is_left_in_the_index(odd: OddLog, tmp_path: Path) -> None:
    odd.grow(600)
    assert await indexed(odd, tmp_path)
    assert b"n10" in (tmp_path / "requests.sqlite").read_bytes()
    odd.store.forget(600)
    await indexed(odd, tmp_path)
    assert b"n10" not in (tmp_path / "requests.sqlite").read_bytes()
