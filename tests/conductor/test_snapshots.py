"""The snapshot file: used when it fits, passed over with a word when it does not, and never in the way."""

import asyncio
import errno
import hashlib
import logging
import stat
from pathlib import Path

import pytest

from conductor.core.cluster import Cluster
from conductor.digests import fold_digest
from conductor.snapshots import Snapshots
from models import registry
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogState, StoredRecord
from tests.conductor.script import SUBJECTS, Script, deployment

pytestmark = pytest.mark.timeout(20)
FOLD = "f" * 32


def served(requests: int = 3) -> Script:
    """A history: some requests, of which the first has ended."""
    script = Script()
    script.open_epoch()
    script.join()
    for number in range(requests):
        script.submit(f"r{number}")
    script.run_to_the_end("r0")
    return script


def log_of(script: Script) -> MemoryLog:
    server = MemoryStore(SUBJECTS)
    server.created_ns = 1
    server.records = list(script.records)
    return MemoryLog(server)


async def write(folder: Path, script: Script, created_ns: int = 1) -> Snapshots:
    snapshots = Snapshots(folder, fold_digest=FOLD)
    await snapshots.write(script.cluster, script.records[-1], created_ns)
    return snapshots


async def read(snapshots: Snapshots, log: MemoryLog) -> Cluster | None:
    return await snapshots.read(log, registry.graph, SUBJECTS)


def names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    script = served()
    cluster = await read(await write(tmp_path, script), log_of(script))
    assert cluster is not None
    assert (cluster.seq, cluster.open, cluster.ended) == (
        len(script.records),
        script.cluster.open,
        script.cluster.ended,
    )


async def test_it_holds_prompts_so_it_is_ours_alone(tmp_path: Path) -> None:
    snapshots = await write(tmp_path / "data" / "conductor", served())
    assert stat.S_IMODE(snapshots.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(snapshots.path.parent.stat().st_mode) == 0o700


async def test_the_next_one_takes_its_place_and_no_draft_is_left(tmp_path: Path) -> None:
    (tmp_path / ".snapshot.4711.1").write_bytes(b"of a conductor that was killed")
    await write(tmp_path, served(2))
    script = served(4)
    snapshots = await write(tmp_path, script)
    cluster = await read(snapshots, log_of(script))
    assert cluster is not None
    assert cluster.seq == len(script.records)
    assert names_in(tmp_path) == ["snapshot"]


async def test_it_may_be_deleted_at_any_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    snapshots.path.unlink()
    assert await read(snapshots, log_of(script)) is None
    assert caplog.records == []  # there is nothing to say


# ---- passed over -----------------------------------------------------------------------------------
async def passed_over(snapshots: Snapshots, log: MemoryLog, caplog: pytest.LogCaptureFixture) -> str:
    """Why it was; that is said once, in one line."""
    caplog.clear()
    assert await read(snapshots, log) is None
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith(f"cannot use the snapshot {snapshots.path}, reading the whole log instead: ")
    assert "\n" not in said
    return said.partition("instead: ")[2]


async def test_a_truncated_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    whole = snapshots.path.read_bytes()
    for length in (0, 1, 17, 18, 40, len(whole) // 2, len(whole) - 33, len(whole) - 1):
        snapshots.path.write_bytes(whole[:length])
        assert "damaged" in await passed_over(snapshots, log_of(script), caplog)


async def test_one_flipped_byte_is_found_wherever_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = served(1)
    snapshots = await write(tmp_path, script)
    whole = snapshots.path.read_bytes()
    log = log_of(script)
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        snapshots.path.write_bytes(flipped)
        assert "damaged" in await passed_over(snapshots, log, caplog)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not a snapshot"),
        (b"dalsegno snapshot\n", "it is not a snapshot"),
        (b"something else", "it is not a snapshot"),
        (b"dalsegno snapshot\n\xff\0\0\0", "Input data was truncated"),
    ],
)
async def test_a_file_of_another_kind_is_passed_over(
    content: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = served()
    snapshots = Snapshots(tmp_path, fold_digest=FOLD)
    snapshots.path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    assert await passed_over(snapshots, log_of(script), caplog) == why


async def test_that_of_another_log_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    snapshots = await write(tmp_path, script, created_ns=2)
    assert await passed_over(snapshots, log_of(script), caplog) == "it belongs to another log"


async def test_that_of_other_sources_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    await write(tmp_path, script)
    other = Snapshots(tmp_path, fold_digest="0" * 32)
    assert "another version" in await passed_over(other, log_of(script), caplog)


async def test_one_that_is_newer_than_the_logs_end_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    script.records.pop()
    why = await passed_over(snapshots, log_of(script), caplog)
    assert why == f"its position is {len(script.records) + 1}, but the log ends at {len(script.records)}"


async def test_one_of_a_log_that_lost_its_end_and_grew_again_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    last = script.records.pop()
    script.records.append(StoredRecord(last.seq, last.subject, last.data + b"\0", last.time_ns))
    script.submit("later")
    assert "another record" in await passed_over(snapshots, log_of(script), caplog)


class Forgetful(MemoryLog):
    """A log that begins where it is told."""

    first_seq = 1

    async def state(self) -> LogState:
        found = await super().state()
        return LogState(
            first_seq=self.first_seq,
            last_seq=found.last_seq,
            created_ns=found.created_ns,
            messages=found.messages,
            bytes=found.bytes,
        )


async def test_the_log_must_reach_back_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    at = len(script.records)
    script.submit("later")
    server = MemoryStore(SUBJECTS)
    server.created_ns, server.records = 1, list(script.records)
    log = Forgetful(server)
    log.first_seq = at + 1  # the record behind which it was written is forgotten, the next is there
    cluster = await read(snapshots, log)
    assert cluster is not None
    assert cluster.seq == at
    log.first_seq = at + 2
    assert f"the log begins at {at + 2}" in await passed_over(snapshots, log, caplog)


async def test_one_of_another_format_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    content = snapshots.path.read_bytes()[:-32].replace(b"version\x01", b"version\x02", 1)
    snapshots.path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    assert await passed_over(snapshots, log_of(script), caplog) == "expected format 1, found 2"


async def test_a_state_that_does_not_fit_the_cluster_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = served()
    snapshots = await write(tmp_path, script)
    content = snapshots.path.read_bytes()[:-32].replace(b"leader", b"reader", 1)
    snapshots.path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    assert "fields" in await passed_over(snapshots, log_of(script), caplog)


async def test_a_file_that_cannot_be_read_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = Snapshots(tmp_path, fold_digest=FOLD)
    snapshots.path.mkdir()
    why = await passed_over(snapshots, log_of(served()), caplog)
    assert why == f"[Errno {errno.EISDIR}] Is a directory: '{snapshots.path}'"


# ---- writing ---------------------------------------------------------------------------------------
async def test_what_cannot_be_written_is_said_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.write_text("where the folder should be")
    script = served()
    snapshots = await write(folder, script)
    await snapshots.write(script.cluster, script.records[-1], 1)
    assert len([one for one in caplog.records if "cannot write the snapshot" in one.getMessage()]) == 1


async def test_it_is_of_the_moment_in_which_it_was_begun(tmp_path: Path) -> None:
    """The conductor goes on while it is written."""
    script = served()
    snapshots = Snapshots(tmp_path, fold_digest=FOLD)
    at = len(script.records)
    before = dict(script.cluster.open)
    writing = asyncio.ensure_future(snapshots.write(script.cluster, script.records[-1], 1))
    await asyncio.sleep(0)
    script.submit("later")
    await writing
    cluster = await read(snapshots, log_of(script))
    assert cluster is not None
    assert (cluster.seq, cluster.open) == (at, before)


def test_the_digest_of_a_fold_is_of_model_and_sources() -> None:
    assert fold_digest(deployment()) == fold_digest(deployment())
    for change in ({"family": "other"}, {"graph_digest": "x"}, {"plan_digest": "x"}):
        assert fold_digest(deployment(**change)) != fold_digest(deployment())
    assert fold_digest(deployment(config_digest="x")) == fold_digest(deployment())
