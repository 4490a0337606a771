"""`dalsegno gate` over the data dir of a busy deployment that lost a worker and a conductor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest

from shared.events import RequestAdmitted
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running

BUSY: Final = ("--set", "max_concurrent_requests=2", "--set", "scheduling.max_waiting=3")
MUTATED: Final = """
import sys
from dalsegno.cli import main
from tests.dalsegno.gate.mutations import SCHEDULING
mutation = next(one for one in SCHEDULING if one.name == sys.argv[1])
with mutation.applied():
    main(sys.argv[2:])
"""


async def ask(http: httpx.AsyncClient, number: int) -> int:
    """Ask for a long answer; return the status."""
    body = {
        "model": "demo",
        "request_id": f"q{number}",
        "priority": number % 3,
        "messages": [{"role": "user", "content": "What does zip do?"}],
        "temperature": 0,
        "max_tokens": 100,
        "ignore_eos": True,
    }
    return (await http.post("/v1/chat/completions", json=body)).status_code


async def ask_all(http: httpx.AsyncClient, numbers: range) -> list[int]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(http, number)) for number in numbers]
    return [one.result() for one in asked]


async def keep_busy(running: Running) -> None:
    """More requests than may run and wait, with priorities; a worker dies, then a conductor."""
    async with clients.http(running) as http, clients.reader(running) as reader:
        walks = reader.subjects.walk("*")
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask_all(http, range(8)))
            await reader.until(walks, RequestAdmitted)
            os.kill(running.pids.worker["0"], signal.SIGKILL)
        assert sorted(set(asked.result())) == [200, 429]
        await clients.wait_until_ready(running)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask_all(http, range(10, 14)))
            await reader.until(reader.subjects.walk("q10"), RequestAdmitted)
            os.kill(running.pids.conductor[0], signal.SIGKILL)
        assert set(asked.result()) == {200}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data dir of a deployment that was stopped."""
    with deploy.serve(tmp_path_factory.mktemp("gate"), *BUSY) as running:
        asyncio.run(keep_busy(running))
        followed = clients.run_on(running, "gate", "--levels", "control")
        assert followed.returncode == 0, followed.stdout
    return running.data_dir


def test_the_code_that_decided_decides_the_same(data_dir: Path) -> None:
    found = clients.run("gate", str(data_dir), "--levels", "control,schedule", "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    data = json.loads(found.stdout)
    control, schedule = data["levels"]
    assert (control["requests"], schedule["requests"]) == (12, 12)
    codes = next(one for one in data["coverage"] if one["name"] == "codes")
    assert codes["seen"] == {"queue_full": 3}
    # Without `worker.lost`, if the successor joined before the killed worker's silence was noticed.
    types = next(one for one in data["coverage"] if one["name"] == "event types")
    assert "request.resumed" in types["seen"]


def test_another_configuration_is_different_and_the_newest_requests_can_be_chosen(data_dir: Path) -> None:
    found = clients.run("gate", str(data_dir), "--config", "demo", "--processes", "2")
    assert found.returncode == 1
    assert 'schedule: 3 of 12: request.rejected (decision) "queue_full" -> nothing' in found.stdout
    last = clients.run("gate", str(data_dir), "--last", "2", "--json")
    assert [one["requests"] for one in json.loads(last.stdout)["levels"]] == [2, 2]


@pytest.mark.parametrize(
    "name",
    ["priorities are reversed", "one request at a time", "the refusal has another code", "one more may wait"],
)
def test_a_mistake_that_a_replay_does_not_notice_is_different(data_dir: Path, name: str) -> None:
    def run(*args: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", MUTATED, name, *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=clients.PATIENCE_S, cwd=clients.ROOT
        )

    found = run("gate", str(data_dir))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "\nschedule: " in found.stdout
    assert run("replay", "--all", "--data-dir", str(data_dir)).returncode == 0


def test_the_nodes_of_a_sample_are_run_again(data_dir: Path) -> None:
    found = clients.run("gate", str(data_dir), "--levels", "data", "--last", "1", "--tolerance", "0.001")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("data: 1 request, ")
