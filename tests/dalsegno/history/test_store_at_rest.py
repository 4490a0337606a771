"""Data dirs at rest that cannot be written, or that are damaged, are read and left as they are."""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli import main
from dalsegno.history import store_at_rest
from dalsegno.serve.data_dir import DataDir, DataDirError
from shared.events import EpochOpened, Event, Inputs, RequestSubmitted, encode
from shared.log.nats import jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.nats.store_files import StoreFiles
from shared.log.port import MissingRecords
from shared.subjects import Subjects

pytestmark = pytest.mark.processes

SUBJECTS = Subjects()
REQUESTS = 8


async def _fill(server: NatsServer) -> None:
    await jetstream.provision(server.url, server.credentials, SUBJECTS)
    log = await jetstream.connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="test")
    events: list[tuple[str, Event]] = [
        (SUBJECTS.epoch, EpochOpened(id="epoch.1", writer="conductor", epoch=1, conductor="c", core="0"))
    ]
    for number in range(REQUESTS):
        submitted = RequestSubmitted(request_id=f"r{number}", model="m", inputs=Inputs(text="x" * 100))
        events.append((SUBJECTS.request(f"r{number}"), submitted))
    for subject, event in events:
        await log.publish(subject, encode(event))
    await log.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("filled")
    server = NatsServer(data_dir / "nats")
    server.start()
    asyncio.run(_fill(server))
    server.stop()
    return data_dir


@pytest.fixture
def data_dir(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


@pytest.fixture
def unwritable(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data dir without write permission, also for a superuser, whom the kernel would let write."""
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: data_dir not in Path(path).parents and access(path, mode),
    )
    for path in (data_dir, *data_dir.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    yield data_dir
    for path in (data_dir, *data_dir.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
    return total.hexdigest()


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def cut(data_dir: Path, size: int | None) -> str:
    """Cut off the block file, or remove it; return its path."""
    [block] = data_dir.glob("nats/jetstream/*/streams/DS_LOG/msgs/*.blk")
    if size is None:
        block.unlink()
    else:
        os.truncate(block, size)
    return str(block)


def test_a_data_dir_that_cannot_be_written_is_read_and_left_as_it_is(unwritable: Path) -> None:
    before = digest(unwritable)
    assert run("replay", "--all", "--data-dir", unwritable).exit_code == 0
    assert f"r{REQUESTS - 1}" in run("log", "--data-dir", unwritable).stdout
    assert digest(unwritable) == before


def test_a_data_dir_that_cannot_be_written_and_is_in_use_is_refused(data_dir: Path) -> None:
    shared = store_at_rest._shared_lock(DataDir(data_dir))
    with DataDir(data_dir).lock(), pytest.raises(DataDirError, match="in use by a deployment"), shared:
        pass


def test_a_data_dir_that_cannot_be_read_is_named(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    refused = run("replay", "--all", "--data-dir", unwritable)
    assert refused.exit_code != 0
    assert "run as a user who may read it" in refused.stderr


@pytest.mark.parametrize("size", [1200, 0, None])
def test_missing_records_are_named_and_fail_the_replay_each_time(data_dir: Path, size: int | None) -> None:
    block = cut(data_dir, size)
    before = digest(data_dir / "nats" / "jetstream")
    for _ in range(2):
        replayed = run("replay", "--all", "--data-dir", data_dir)
        assert replayed.exit_code == 1
        assert f"to {REQUESTS + 1} are missing: " in replayed.stderr
        assert (block if size is not None else str(Path(block).parent)) in replayed.stderr
        assert digest(data_dir / "nats" / "jetstream") == before, "the evidence"


def test_every_command_says_that_records_are_missing(data_dir: Path, tmp_path: Path) -> None:
    cut(data_dir, 1200)
    for command in (["log"], ["log", "r0"], ["export", "r0", "-o", str(tmp_path / "r0.bundle")]):
        told = run(*command, "--data-dir", data_dir)
        assert f"to {REQUESTS + 1} are missing: " in told.stderr, command
    one = run("replay", "r0", "--data-dir", data_dir)
    assert one.exit_code == 1
    assert "r0: cannot be replayed: its log is damaged, and may lack records of it" in one.stdout
    gone = run("replay", f"r{REQUESTS - 1}", "--data-dir", data_dir)
    assert gone.exit_code != 0
    assert "the log is damaged: records" in gone.stderr


def test_a_bundle_of_a_damaged_request_fails_its_replay(data_dir: Path, tmp_path: Path) -> None:
    cut(data_dir, 1200)
    bundle = tmp_path / "r0.bundle"
    assert (
        "r0 cannot be replayed from it: its log is damaged"
        in run("export", "r0", "-o", bundle, "--data-dir", data_dir).output
    )
    replayed = run("replay", bundle)
    assert replayed.exit_code == 1
    assert "cannot be replayed: its log is damaged" in replayed.output


# ---- the index -------------------------------------------------------------------------------------------


@pytest.fixture
def whole_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for each time that a log is read to find missing records."""
    found: list[str] = []
    find_missing = jetstream.JetStreamLog.find_missing

    async def observed(self: jetstream.JetStreamLog, files: StoreFiles) -> tuple[MissingRecords, ...]:
        found.append("read")
        return await find_missing(self, files)

    monkeypatch.setattr(jetstream.JetStreamLog, "find_missing", observed)
    return found


def listed(data_dir: Path, *options: str) -> list[str]:
    result = run("log", "--json", "--data-dir", data_dir, *options)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_a_log_that_was_found_whole_is_not_read_again_for_a_list(
    data_dir: Path, whole_reads: list[str]
) -> None:
    first = listed(data_dir)
    assert len(first) == REQUESTS
    assert listed(data_dir) == first
    assert listed(data_dir, "--limit", "3") == first[-3:]
    assert len(whole_reads) == 1
    assert listed(data_dir, "--no-index") == first
    assert len(whole_reads) == 2, "who wants no index reads the log"
    assert run("replay", "--all", "--data-dir", data_dir).exit_code == 0
    assert len(whole_reads) == 3, "who replays reads the log"
    assert listed(data_dir) == first
    assert len(whole_reads) == 3


def test_a_log_that_grew_is_read_again(data_dir: Path, whole_reads: list[str]) -> None:
    assert len(listed(data_dir)) == REQUESTS
    server = NatsServer(data_dir / "nats")
    server.start()
    asyncio.run(_submit(server, "late"))
    server.stop()
    assert json.loads(listed(data_dir)[-1])["request_id"] == "late"
    assert len(listed(data_dir)) == REQUESTS + 1
    assert len(whole_reads) == 2


async def _submit(server: NatsServer, request_id: str) -> None:
    log = await jetstream.connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="test")
    submitted = RequestSubmitted(request_id=request_id, model="m", inputs=Inputs(text="x"))
    await log.publish(SUBJECTS.request(request_id), encode(submitted))
    await log.close()


@pytest.mark.parametrize("size", [1200, 0, None])
def test_damage_is_found_after_a_list_was_made(data_dir: Path, size: int | None) -> None:
    listed(data_dir)
    cut(data_dir, size)
    for _ in range(2):
        told = run("log", "--data-dir", data_dir)
        assert f"to {REQUESTS + 1} are missing: " in told.stderr
        assert f"r{REQUESTS - 1}" not in told.stdout, "the index knew it, and the log does not"


def test_a_changed_byte_is_found_although_size_and_time_are_as_before(data_dir: Path) -> None:
    listed(data_dir)
    [block] = data_dir.glob("nats/jetstream/*/streams/DS_LOG/msgs/*.blk")
    at, data = block.stat(), bytearray(block.read_bytes())
    data[len(data) // 2] ^= 0xFF
    block.write_bytes(data)
    os.utime(block, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert "missing: " in run("log", "--data-dir", data_dir).stderr


def test_a_damaged_note_of_what_was_found_whole_is_no_note(data_dir: Path, whole_reads: list[str]) -> None:
    first = listed(data_dir)
    note = data_dir / "index" / "whole.json"
    for content in (b"", b"junk", b"[]", note.read_bytes().replace(b"DS_LOG", b"ANOTHER")):
        note.write_bytes(content)
        assert listed(data_dir) == first
    assert len(whole_reads) == 5


def test_the_index_of_a_data_dir_that_cannot_be_written_is_in_the_users_cache(
    unwritable: Path, whole_reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = digest(unwritable)
    first = listed(unwritable)
    assert listed(unwritable) == first
    assert len(whole_reads) == 1
    assert digest(unwritable) == before
    [folder] = (tmp_path / "cache" / "dalsegno" / "index").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "lock", "requests.sqlite", "seal.json", "whole.json",
    }  # fmt: skip


def test_without_any_place_for_an_index_the_log_is_listed(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(listed(unwritable)) == REQUESTS


def test_requests_are_chosen(data_dir: Path) -> None:
    assert listed(data_dir, "--outcome", "open", "--limit", "1") == listed(data_dir)[-1:]
    assert listed(data_dir, "--not", "outcome=open") == []
    none = run("log", "--outcome", "failed", "--data-dir", data_dir)
    assert none.stdout == f"none of the {REQUESTS} requests in this log is such a one\n"
    assert listed(data_dir, "--text", "X" * 100, "--model", "m", "--since", "1h") == listed(data_dir)


@pytest.mark.parametrize(("argument", "why"), [("r0", "REQUEST_ID is one"), ("-f", "--follow shows the")])
def test_requests_are_chosen_from_the_list_only(data_dir: Path, argument: str, why: str) -> None:
    refused = run("log", argument, "--text", "x", "--data-dir", data_dir)
    assert refused.exit_code == 2
    assert why in refused.stderr
