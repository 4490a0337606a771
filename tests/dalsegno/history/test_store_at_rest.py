"""Data dirs at rest that cannot be written, or that are damaged, are read and left as they are."""

import asyncio
import hashlib
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
