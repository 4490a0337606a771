import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli import main
from dalsegno.config import environment
from dalsegno.serve.data_dir import DataDir
from dalsegno.serve.role_runs import Command
from shared.log.nats.private_server import NatsServer
from tests import forked
from tests.dalsegno.fakes import REFUSING
from tests.hostile import NO_TOKENS


def dalsegno(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def the_line(result: Result, status: int = 1) -> str:
    """The one line of an error."""
    assert result.exit_code == status, result.output
    assert not result.stdout
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("Error: ")


@pytest.fixture(autouse=True)
def _no_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` runs in the tests' own process, which is not to be forked."""
    monkeypatch.setenv("DALSEGNO_RECOVERY_TEMPLATES", "false")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A folder that looks like a checkpoint; it is never loaded."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}'
    )
    return str(folder)


def test_version_is_the_packages() -> None:
    assert dalsegno("version").output == dalsegno("--version").output == f"{version('dalsegno')}\n"


def test_help_lists_every_command() -> None:
    listed = dalsegno("--help").output
    for name in ("serve", "ask", "log", "replay", "provision", "gateway", "conductor", "worker", "version"):
        assert f"\n  {name} " in listed
    assert max(map(len, listed.splitlines())) <= 80
    assert "...\n" not in listed.partition("\n")[2]


@pytest.mark.processes
def test_ask_without_a_server_is_one_line() -> None:
    line = the_line(dalsegno("ask", "What does len do?", "--url", "http://127.0.0.1:1"))
    assert line.startswith("no server answers at http://127.0.0.1:1")


def test_what_is_interrupted_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dalsegno.ask.chat.stream_answer", interrupted)
    ended = dalsegno("ask", "What does len do?")
    assert (ended.exit_code, ended.output) == (130, "")


@pytest.mark.parametrize("command", [["log"], ["replay", "--all"]])
def test_two_logs_at_once_are_a_mistake_in_the_arguments(command: list[str], tmp_path: Path) -> None:
    ended = dalsegno(*command, "--nats", "nats://127.0.0.1:1", "--data-dir", str(tmp_path))
    assert ended.exit_code == 2
    assert "name one of them" in ended.stderr


def test_nothing_is_followed_where_nothing_runs(tmp_path: Path) -> None:
    line = the_line(dalsegno("log", "--follow", "--data-dir", str(tmp_path)))
    assert line.startswith(f"no deployment is running on {tmp_path}")


def test_a_misspelt_model_is_one_line_with_a_guess() -> None:
    assert the_line(dalsegno("serve", "demmo")).endswith("did you mean 'demo'?")


def test_a_misspelt_command_or_option_is_status_2() -> None:
    for args in (
        ["sevre"],
        ["serve", "demo", "--prot", "1"],
        ["serve"],
        ["serve", "demo", "--prefix", "a.b"],
        ["provision", "--nats", "nats://127.0.0.1:1", "--prefix", "DS"],  # the stream of `ds`
    ):
        result = dalsegno(*args)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


@pytest.mark.processes
def test_what_a_role_refuses_for_good_is_the_status_of_serve(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Command(name="worker-0", program=(sys.executable, "-c", REFUSING), args=(), env={})
    monkeypatch.setattr("dalsegno.serve.role_commands.commands", lambda *_: [worker])

    result = dalsegno("serve", checkpoint, "--port", "0", "--data-dir", str(tmp_path / "data"))
    at_once = dalsegno("serve", checkpoint, "--port", "0", "--set", "max_seq_len=65")

    assert result.exit_code == 78
    assert result.stderr.splitlines()[-1] == "Error: worker-0: model 'x' is unknown"
    assert the_line(at_once, status=78).startswith("--set: max_seq_len is 65, but the model in")


@pytest.mark.processes
def test_a_port_in_use_is_said_before_anything_starts(checkpoint: str, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = the_line(dalsegno("serve", checkpoint, "--port", port, "--data-dir", str(data_dir)))
    assert line.startswith(f"cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert not data_dir.exists()


def test_a_data_dir_in_use_is_said_and_the_other_deployment_keeps_its_files(
    checkpoint: str, tmp_path: Path
) -> None:
    data = DataDir(tmp_path / "data")
    ready_file = tmp_path / "ready.json"
    ready_file.write_text("of the other")
    with data.lock():
        told = ("--port", "0", "--data-dir", str(data.path), "--ready-file", str(ready_file))
        line = the_line(dalsegno("serve", checkpoint, *told))
    assert line.startswith(f"the data dir {data.path} is in use by another deployment")
    assert ready_file.read_text() == "of the other"


@pytest.mark.processes
def test_a_ready_file_that_cannot_be_written_is_said_before_anything_starts(
    checkpoint: str, tmp_path: Path
) -> None:
    told = (
        "--port",
        "0",
        "--data-dir",
        str(tmp_path / "data"),
        "--ready-file",
        str(tmp_path / "no" / "ready"),
    )
    assert the_line(dalsegno("serve", checkpoint, *told)).endswith(f"{tmp_path / 'no'} is not a folder")


@pytest.mark.processes
def test_joining_a_nats_that_is_not_there_is_one_line(checkpoint: str, tmp_path: Path) -> None:
    told = ("--port", "0", "--data-dir", str(tmp_path / "data"), "--nats", "nats://127.0.0.1:1")
    # In a process of its own: a connection that an earlier test left open would be told of on its stderr.
    ended = forked.run("serve", checkpoint, *told, env={**os.environ}, cwd=None, timeout_s=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert "127.0.0.1:1" in line


@pytest.mark.processes
@pytest.mark.parametrize("role", [["provision"], ["gateway", "--port", "0"], ["conductor"], ["worker"]])
def test_a_role_without_its_nats_is_one_line(role: list[str], checkpoint: str) -> None:
    model = ["--config", checkpoint] if role != ["provision"] else []
    command = [sys.executable, "-m", "dalsegno", *role, *model, "--nats", "nats://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "127.0.0.1:1" in line


@pytest.mark.processes
def test_a_nats_without_jetstream_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path / "nats", jetstream=False)
    server.start()
    try:
        monkeypatch.setenv(environment.NATS_TOKEN, server.token)
        assert "JetStream" in the_line(dalsegno("provision", "--nats", server.url))
    finally:
        server.stop()


@pytest.mark.processes
def test_a_wrong_token_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        monkeypatch.setenv(environment.NATS_TOKEN, "not sesame")
        line = the_line(dalsegno("provision", "--nats", server.url))
        assert "not sesame" not in line
        assert server.url.removeprefix("nats://") in line
    finally:
        server.stop()


@pytest.mark.processes
def test_provision_may_be_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        monkeypatch.setenv(environment.NATS_TOKEN, server.token)
        for _ in range(2):
            assert dalsegno("provision", "--nats", server.url).exit_code == 0
    finally:
        server.stop()


def test_a_private_server_is_no_cluster_and_that_is_said_before_anything_starts(
    checkpoint: str, tmp_path: Path
) -> None:
    told = ("--port", "0", "--data-dir", str(tmp_path / "data"), "--durability", "cluster")
    line = the_line(dalsegno("serve", checkpoint, *told))
    assert line.startswith(
        "--durability: nats.durability: expected host or process for a private server, found cluster"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.processes
def test_a_durability_that_the_server_does_not_give_is_one_line_and_says_what_to_do(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        monkeypatch.setenv(environment.NATS_TOKEN, server.token)
        nats = ("--nats", server.url)
        serve = ("serve", checkpoint, "--port", "0", "--data-dir", str(tmp_path / "data"), *nats)
        said = {
            name: the_line(dalsegno(*command, *nats, "--durability", name))
            for command, name in ((("provision",), "cluster"), (("provision",), "host"))
        }
        served = the_line(dalsegno(*serve, "--durability", "host"))
        provisioned = dalsegno("provision", *nats)
        role = [sys.executable, "-m", "dalsegno", "conductor", "--config", checkpoint, *nats]
        ended = subprocess.run(
            [*role, "--durability", "host"], capture_output=True, text=True, check=False, timeout=60
        )
    finally:
        server.stop()

    assert "a NATS cluster of at least 3 servers" in said["cluster"]
    assert "monitoring addresses in nats.monitors" in said["host"]
    assert served == said["host"]
    assert "survive the end of any process, but not of the NATS server's machine" in provisioned.output
    assert ended.returncode == 78
    assert "run `dalsegno provision --durability host`" in ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize("role", ["gateway", "conductor", "worker"])
def test_a_role_refuses_an_unknown_model_with_a_status_of_its_own(role: str) -> None:
    command = [sys.executable, "-m", "dalsegno", role, "--config", "demmo", "--nats", "nats://127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 78
    assert ended.stderr.strip().endswith("did you mean 'demo'?")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.processes
def test_serve_imports_neither_torch_nor_an_http_server_nor_nats() -> None:
    script = "import sys, dalsegno.cli, dalsegno.serve.command, dalsegno.serve.assembly; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "uvicorn", "nats"} & set(loaded.stdout.split())


@pytest.mark.processes
def test_a_worker_refuses_a_rank_that_hosts_nothing(checkpoint: str) -> None:
    args = ["worker", "--config", checkpoint, "--rank", "7", "--nats", "nats://127.0.0.1:1"]
    ended = subprocess.run(
        [sys.executable, "-m", "dalsegno", *args], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 78
    assert ended.stderr == "Error: rank 7 is not a rank of checkpoint: expected one of [0]\n"


@pytest.mark.parametrize("command", ["log", "replay"])
@pytest.mark.parametrize("request_id", [text for text in NO_TOKENS.values() if text and "\0" not in text])
def test_an_id_that_is_none_is_one_line_and_asks_nobody(command: str, request_id: str) -> None:
    nobody = ["--nats", "nats://127.0.0.1:1"]
    result = dalsegno(command, *nobody, "--", request_id)

    assert result.exit_code in (1, 2)
    assert "cannot be reached" not in result.output
    assert "Traceback" not in result.output
