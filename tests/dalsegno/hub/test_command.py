"""`dalsegno check` and `dalsegno serve` with the name of a model on a hub, over the real command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli import main
from dalsegno.config import resolve
from dalsegno.config.environment import HUB_OFFLINE
from models.checkpoints.hub_cache import HubName, origin
from tests.dalsegno.hub.fake_hub import FakeHub, Fault
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.processes

REPOSITORY = "tiny/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    fake.add(REPOSITORY, tiny_checkpoint(shards=2), pytorch_model_DOT_bin=b"a pickle")
    monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", *HUB_OFFLINE):
        monkeypatch.delenv(name, raising=False)
    with fake.running():
        yield fake


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def test_check_reads_the_configuration_and_the_headers_of_weights(hub: FakeHub) -> None:
    result = check(REPOSITORY, "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["name"], found["model"]) == ("model", "decoder_lm")
    assert found["revision"] == f"{REPOSITORY}@{hub.commit(REPOSITORY)}"
    files = hub.repositories[REPOSITORY]
    weights = sum(len(content) for name, content in files.items() if name.endswith(".safetensors"))
    assert 0.9 * weights < found["memory"]["weights_bytes"] < weights
    assert {one.range for one in hub.seen if one.path.startswith("/cdn/")} == {"bytes=0-100000"}


def test_check_says_the_memory_and_the_revision(hub: FakeHub) -> None:
    result = check(f"{REPOSITORY}@v1")

    assert f"revision {REPOSITORY}@{hub.commit(REPOSITORY)}" in result.output
    assert "the weights take" in result.output
    assert "keys and values take" in result.output


def test_check_of_a_gated_model_says_what_to_do(hub: FakeHub) -> None:
    hub.needs_token = "hf_secret"

    result = check(REPOSITORY)

    assert result.exit_code == 78
    assert "HF_TOKEN" in result.output


def test_check_while_the_hub_is_away(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    result = check(REPOSITORY, "--json")

    assert json.loads(result.stdout)["code"] == "hub_unavailable"


def test_a_folder_of_that_name_wins(hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / REPOSITORY).symlink_to(tiny_checkpoint())

    result = check(REPOSITORY, "--json")

    assert json.loads(result.stdout)["checkpoint"] == str((tmp_path / REPOSITORY).resolve())
    assert "not a model on a hub" in caplog.text
    assert hub.seen == []


def test_demos_are_not_looked_up(hub: FakeHub) -> None:
    assert check("demo").exit_code == 0
    assert hub.seen == []


def test_a_file_names_a_model_on_a_hub(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"model: {REPOSITORY}@v1\nmax_seq_len: 64\n")

    found = resolve.effective("mine.yaml", ())

    assert (found.config.name, found.config.model, found.config.max_seq_len) == ("mine", "decoder_lm", 64)
    commit = HubName(repository=REPOSITORY, revision=hub.commit(REPOSITORY))
    assert origin(Path(found.config.checkpoint)) == commit
    hub.seen.clear()
    again = resolve.effective("mine.yaml", resolve.pinned(found))
    assert again.config == found.config
    assert hub.seen == []


def test_a_file_with_two_checkpoints_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"model: {REPOSITORY}\ncheckpoint: x\n")

    result = check("mine.yaml")

    assert result.exit_code == 78
    assert "leave checkpoint out" in result.output


def test_a_killed_download_is_continued(hub: FakeHub, tmp_path: Path) -> None:
    size = 24 << 20  # of which a client writes the first 10 MB at once
    hub.repositories[REPOSITORY] |= {"model-00001-of-00002.safetensors": os.urandom(size)}
    fault = Fault(on="GET /cdn/", cut=15 << 20, hold=Event())
    hub.faults = [fault]
    program = "from dalsegno.config import resolve; resolve.effective('tiny/model', ())"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        assert fault.reached.wait(60)
        parts = tmp_path / "hub/models--tiny--model/blobs"
        deadline = Event()
        while not any(path.stat().st_size >= 10 << 20 for path in parts.glob("*.part")):
            assert process.poll() is None
            deadline.wait(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert fault.hold is not None
        fault.hold.set()
    hub.seen.clear()

    found = resolve.effective(REPOSITORY, ())

    ranges = [one.range for one in hub.seen if one.path.startswith("/cdn/") and one.range]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").rstrip("-")) >= 10 << 20
    content = (Path(found.config.checkpoint) / "model-00001-of-00002.safetensors").read_bytes()
    assert content == hub.repositories[REPOSITORY]["model-00001-of-00002.safetensors"]
