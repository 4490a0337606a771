import contextlib
import json
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Final

import msgspec
import pytest

from configs.checks import resolve
from configs.deployment import SECRETS, SECTIONS, GatewaySettings, NatsSettings, SchedulingSettings
from dalsegno.config import resolve as configuration
from dalsegno.serve import data_dir
from dalsegno.serve.data_dir import DataDir, DataDirError, Pids, ReadyFile, RunningDeployment
from shared.errors import CapacityError, ClientError

DEPLOYMENT = RunningDeployment(
    url="http://127.0.0.1:8000",
    urls=["http://127.0.0.1:8000"],
    nats_url="nats://127.0.0.1:4222",
    nats_token=None,
    nats_client={"user": "client", "password": "sesame"},
    nats_reader={"user": "reader", "password": "simsim"},
    prefix="ds",
    pids=Pids(nats=1, gateway=[2], conductor=[3], worker={"0": 4}),
)


def test_the_default_is_beside_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_dir.of("demo").path == tmp_path / ".dalsegno" / "demo"


def test_one_that_is_told_is_taken(tmp_path: Path) -> None:
    assert data_dir.of("demo", tmp_path / "told").path == tmp_path / "told"


def test_two_deployments_on_one_data_dir_are_refused_by_the_first_ones_process(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    with data.lock():
        holder = data.lock_file.read_text().strip()
        with (
            pytest.raises(DataDirError, match=rf"in use by another deployment \(process {holder}\)"),
            data.lock(),
        ):
            pass
    with data.lock():  # and once it is gone, it is free
        pass


def test_who_starts_the_same_twice_is_told_where_it_serves(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    with data.lock():
        data_dir.write_private(data.deployment_file, DEPLOYMENT)
        said = rf"is already serving \(process \d+\) at {DEPLOYMENT.url}; stop that one"
        with pytest.raises(DataDirError, match=said), data.lock():
            pass


def fail(data: DataDir, *, is_used: bool = False) -> None:
    """Start on `data` and fail."""
    with contextlib.suppress(CapacityError), data.lock() as hold:
        (data.nats / "jetstream").mkdir(parents=True)
        hold.is_used = is_used
        raise CapacityError("no such NATS")


def test_a_start_that_fails_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    fail(DataDir(tmp_path / ".dalsegno" / "demo"))
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_or_was_used_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / ".dalsegno"
    fail(DataDir(folder / "used"), is_used=True)
    (folder / "old").mkdir()
    fail(DataDir(folder / "old"))
    fail(DataDir(folder / "new"))
    assert {entry.name for entry in folder.iterdir()} == {"used", "old"}


def test_a_data_dir_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = DataDir(tmp_path / "file" / "data")
    with pytest.raises(DataDirError, match=r"cannot use the data dir .*: Not a directory"), data.lock():
        pass


def test_only_our_user_reads_the_data_dir_and_what_is_written_there(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    with data.lock():
        data_dir.write_private(data.deployment_file, DEPLOYMENT)
    assert stat.S_IMODE(data.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(data.deployment_file.stat().st_mode) == 0o600
    assert list(data.path.glob(".*")) == []  # no draft is left


def test_the_ready_file_has_the_documented_shape(tmp_path: Path) -> None:
    data_dir.write_private(tmp_path / "ready.json", DEPLOYMENT)
    assert json.loads((tmp_path / "ready.json").read_text()) == {
        "url": "http://127.0.0.1:8000",
        "urls": ["http://127.0.0.1:8000"],
        "nats_url": "nats://127.0.0.1:4222",
        "nats_token": None,
        "nats_client": {"user": "client", "password": "sesame"},
        "nats_reader": {"user": "reader", "password": "simsim"},
        "prefix": "ds",
        "pids": {"nats": 1, "gateway": [2], "conductor": [3], "worker": {"0": 4}},
    }


# ---- a file that says that all is ready ---------------------------------------------------------------

ANNOUNCES: Final = """
import sys, time
from pathlib import Path
from dalsegno.serve.data_dir import ReadyFile
from tests.dalsegno.serve.test_data_dir import DEPLOYMENT
file = ReadyFile(Path(sys.argv[1]))
for _ in range(2):
    file.write(DEPLOYMENT)
print("written", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def announcing(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which has written a ready file and lives until the block ends or kills it."""
    told = (sys.executable, "-c", ANNOUNCES, str(path))
    with subprocess.Popen(told, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


@pytest.mark.processes
def test_a_ready_file_is_held_while_who_wrote_it_lives_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert not data_dir.is_held(path)
    with announcing(path) as launcher:
        assert data_dir.is_held(path)
        assert subprocess.run(["flock", "-ns", path, "true"], check=False).returncode == 1
        launcher.kill()
        launcher.wait()
        assert path.exists()  # its writer was killed
        assert not data_dir.is_held(path)
        assert subprocess.run(["flock", "-ns", path, "true"], check=False).returncode == 0


@pytest.mark.processes
def test_what_a_killed_one_left_is_cleared_and_what_another_holds_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    with announcing(path):
        with pytest.raises(ClientError, match=r"ready\.json is the ready file of a running deployment"):
            ReadyFile(path).clear()
        assert path.exists()
    ReadyFile(path).clear()
    assert not path.exists()


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=rf"cannot remove {tmp_path}: "):  # a folder
        ReadyFile(tmp_path).clear()


def test_who_has_written_nothing_withdraws_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("another's")
    mine = ReadyFile(path)
    mine.withdraw()
    assert path.exists()
    mine.write(DEPLOYMENT)
    mine.withdraw()
    assert not path.exists()


def test_a_deployment_is_found_while_it_runs_and_not_after(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    assert data.running() is None
    with data.lock():
        assert data.running() is None  # not ready yet
        data_dir.write_private(data.deployment_file, DEPLOYMENT)
        assert data.running() == DEPLOYMENT
    assert data.running() is None  # a killed launcher's file is stale


def test_what_was_served_is_known_by_its_digest_afterwards(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    served = resolve("demo")
    with data.lock():
        data.remember(served)
        data.remember(msgspec.structs.replace(served, max_seq_len=512))
    found = data.configs()
    assert found.keys() == {served.digest, msgspec.structs.replace(served, max_seq_len=512).digest}
    assert found[served.digest]["name"] == "demo"
    assert not found[served.digest].keys() & {"data_dir", "devices"}
    assert (
        configuration.of_values({**found[served.digest], "name": "demo"}, "demo").config.digest
        == served.digest
    )


def test_every_section_is_stored_without_its_secrets(tmp_path: Path) -> None:
    sections = {
        "scheduling": SchedulingSettings(max_waiting=7),
        "gateway": GatewaySettings(api_keys=["web=unlatch"]),
        "nats": NatsSettings(url="nats://ann:sesame@here:4222,nats://there:4222", token="sesame"),
    }
    served = msgspec.structs.replace(resolve("demo"), **sections)
    data = DataDir(tmp_path / "data")
    with data.lock():
        data.remember(served)
    stored = data.configs()[served.digest]
    for section, kind in SECTIONS.items():
        public = {one for one in kind.__struct_fields__ if f"{section}.{one}" not in SECRETS}
        assert stored[section].keys() == public
    assert stored["scheduling"]["max_waiting"] == 7
    assert stored["nats"]["url"] == "nats://***@here:4222,nats://there:4222"
    [file] = (data.path / "configs").iterdir()
    assert not re.search("unlatch|sesame|ann", file.read_text())


def test_a_configuration_that_is_damaged_is_not_known_any_more(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    assert data.configs() == {}
    with data.lock():
        data.remember(resolve("demo"))
    [file] = (data.path / "configs").iterdir()
    file.write_text("{")
    assert data.configs() == {}
