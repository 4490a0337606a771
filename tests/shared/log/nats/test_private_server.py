"""The private nats-server: start, death, and reconnection."""

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.log.nats.private_server import NatsServer, ServerStartError, nats_server_binary

pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / 'a "folder" with spaces')
    yield server
    server.kill()


def _greeting(server: NatsServer) -> bytes:
    host, port = server.url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        return sock.makefile("rb").readline()


def test_the_binary_comes_with_its_package() -> None:
    assert os.access(nats_server_binary(), os.X_OK)


def test_a_started_server_answers_on_loopback_and_wants_a_token(server: NatsServer) -> None:
    server.start()
    assert server.url.startswith("nats://127.0.0.1:")
    assert b'"auth_required":true' in _greeting(server)
    assert b'"jetstream":true' in _greeting(server)


def test_starting_twice_starts_once(server: NatsServer) -> None:
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_server_that_ended_comes_back_at_the_same_address_with_the_same_token(
    server: NatsServer, end: str
) -> None:
    server.start()
    before = (server.url, server.credentials, server.pid)
    getattr(server, end)()
    assert server.pid is None
    server.start()
    assert (server.url, server.credentials) == before[:2]
    assert server.pid not in {None, before[2]}


def test_a_server_that_died_by_itself_is_noticed(server: NatsServer) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert server.pid is None
    server.start()
    assert server.pid not in {None, pid}


@pytest.mark.parametrize(("end", "status"), [("stop", 0), ("kill", -signal.SIGKILL)])
def test_who_waits_for_a_server_is_not_in_the_way_of_who_ends_it(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, end: str, status: int
) -> None:
    waits, wait = threading.Event(), subprocess.Popen.wait

    def noted(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        waits.set()
        return wait(process, timeout)

    server.start()
    monkeypatch.setattr(subprocess.Popen, "wait", noted)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.wait)
        assert waits.wait(10), "else it could be ended before anybody waits"
        getattr(server, end)()
        assert waiting.result(10) == status
    assert server.pid is None


def test_nobody_waits_for_a_server_that_does_not_run(server: NatsServer) -> None:
    assert server.wait() == 0


@pytest.mark.parametrize(("cores", "told", "found"), [(2, None, "1"), (2, "2", "2"), (3, None, None)])
def test_where_there_are_few_cores_it_keeps_to_one_unless_told(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, cores: int, told: str | None, found: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if told is not None:
        monkeypatch.setenv("GOMAXPROCS", told)
    server.start()
    environment = Path(f"/proc/{server.pid}/environ").read_text(encoding="utf-8").split("\0")
    told_it = [one.partition("=")[2] for one in environment if one.startswith("GOMAXPROCS=")]
    assert told_it == ([] if found is None else [found])


def test_the_token_is_in_a_private_file_and_on_no_command_line(server: NatsServer) -> None:
    server.start()
    config = server.log_file.parent / "server.conf"
    assert server.token in config.read_text(encoding="utf-8")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert server.token.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert server.token.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert len(server.token) > 40
    assert NatsServer(server.log_file.parent).token != server.token


def test_a_data_folder_in_use_is_a_clear_error(server: NatsServer) -> None:
    server.start()
    with pytest.raises(ServerStartError, match="in use by another nats-server"):
        NatsServer(server.log_file.parent).start()
    assert server.pid is not None
    server.kill()
    successor = NatsServer(server.log_file.parent)
    successor.start()
    successor.kill()


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ServerStartError, match="another program uses the port"):
            NatsServer(tmp_path, port=sock.getsockname()[1]).start()


def test_a_server_that_ends_while_starting_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("a file where a folder must be")
    with pytest.raises(ServerStartError, match=r"ended with status 1 .*not a directory \(log: "):
        NatsServer(tmp_path).start()


def test_an_unstarted_server_has_no_address(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="call start"):
        _ = NatsServer(tmp_path).url


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the parent's death is not told")
def test_a_server_dies_with_its_launcher(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from shared.log.nats.private_server import NatsServer\n"
        f"server = NatsServer(Path({str(tmp_path)!r})); server.start(); print(server.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[4])},
    )
    with launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        os.kill(pid, 0)
        process = os.pidfd_open(pid)
        launcher.kill()
        ended, _, _ = select.select([process], [], [], 10)
        os.close(process)
    assert ended
