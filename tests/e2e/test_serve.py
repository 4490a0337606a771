"""One command serves, stops without leftovers, and continues from its data dir."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.config import environment
from dalsegno.serve.data_dir import is_held
from shared.log.nats.private_server import NatsServer
from tests import timelines
from tests.dalsegno.fakes import gone
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.timelines import Stretch


def chat(running: Running, text: str = "What does len do?") -> str:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"{running.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def dalsegno(*args: str, env: dict[str, str] | None = None) -> str:
    ended = clients.run(*args, env=env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_ask_prints_the_answer_that_chat_gives(deployment: Running) -> None:
    answer = chat(deployment)
    assert answer.strip()
    asked = dalsegno(
        "ask", "What does len do?", "--url", deployment.url, "--temperature", "0", "--max-tokens", "24"
    )
    assert asked == f"{answer}\n"


def test_the_terminal_says_how_to_talk_to_it(deployment: Running) -> None:
    said = deployment.log()
    assert f"Dal Segno serves demo at {deployment.url}" in said
    assert f"--url {deployment.url}" in said


@dataclass(frozen=True, kw_only=True)
class Life:
    """A deployment that was served, answered one request, and was stopped by Ctrl-C.

    Attributes:
        folder: the folder to serve it again from.
        left: its ready file remained after its end.
    """

    folder: Path
    answer: str
    pids: list[int]
    status: int
    left: bool
    profile: list[Stretch]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("lives")
    profile = folder / "profile.json"
    with deploy.serve(folder, "--profile", str(profile)) as running:
        answer, pids = chat(running), running.all_pids()
        status = running.stop()
        left = running.ready_file.exists()
    found = timelines.read(profile)
    return Life(folder=folder, answer=answer, pids=pids, status=status, left=left, profile=found)


@pytest.fixture(scope="module")
def second(first: Life) -> Iterator[Running]:
    """The same deployment, started again."""
    with deploy.serve(first.folder) as running:
        yield running


async def test_ctrl_c_leaves_nothing(first: Life) -> None:
    assert first.status == 0
    assert not first.left
    await gone(*first.pids)


def test_the_next_start_goes_on(first: Life, second: Running) -> None:
    assert chat(second) == first.answer
    requests = dalsegno("log", "--data-dir", str(second.data_dir)).splitlines()
    assert sum("finished" in line for line in requests) == 2  # one of each life


def test_a_profile_has_what_every_process_did_for_an_answer(first: Life) -> None:
    check_one_answer(first.profile)


def check_one_answer(found: list[Stretch]) -> None:
    """A profile shows all processes' work for it, on one clock: causes precede their effects."""
    [answer] = [one for one in found if one.name == "answer /v1/chat/completions"]
    steps = [one for one in found if one.name == "step" and answer.since_us < one.until_us < answer.until_us]
    assert sum(one.told["sampled"] for one in steps) == answer.told["tokens"]
    for part in ("schedule", "build", "forward", "sample"):
        assert sum(one.name == part and one.process == "worker-0" for one in found) >= len(steps)
    hops = [one for one in found if one.thread is None and "seq" in one.told]
    order = next(one for one in hops if one.name == "publish ready")
    [read] = [one for one in hops if one.process == "worker-0" and one.told == order.told]
    assert (order.process, read.name) == ("conductor", "deliver ready")
    assert answer.since_us < order.since_us < read.until_us < steps[0].until_us


def kill(running: Running, role: str) -> None:
    """Kill a role with -9, and wait until another process has replaced it."""
    before = pid_of(running, role)
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while pid_of(running, role) in {before, 0}:
        assert time.monotonic() < deadline, running.log()
        time.sleep(0.01)


def pid_of(running: Running, role: str) -> int:
    pids = running.pids
    found = {
        "nats": pids.nats,
        "gateway": next(iter(pids.gateway), None),
        "conductor": next(iter(pids.conductor), None),
        "worker": pids.worker.get("0"),
    }[role]
    return found or 0


def wait_until_ready(running: Running) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{running.url}/health/ready", timeout=10):
                return
        except OSError:
            assert time.monotonic() < deadline, running.log()
            time.sleep(0.05)


@pytest.mark.slow
def test_whoever_is_killed_is_back_and_serves(first: Life, second: Running) -> None:
    for role in ("gateway", "conductor", "worker", "nats"):
        kill(second, role)
        wait_until_ready(second)
        assert chat(second) == first.answer, role


async def test_a_launcher_that_is_killed_takes_all_with_it(second: Running) -> None:
    """The last of its tests."""
    pids = second.all_pids()
    assert is_held(second.ready_file)
    second.launcher.kill()
    second.launcher.wait()
    await gone(*pids)
    assert second.ready_file.exists()
    assert not is_held(second.ready_file), "the file that it left tells of a deployment that runs"


def test_it_joins_a_nats_that_runs_already(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        told = {environment.NATS_TOKEN: server.token}
        with deploy.serve(tmp_path, "--nats", server.url, "--prefix", "mine", env=told) as running:
            assert (running.nats_url, running.now.nats_token, running.prefix) == (
                server.url,
                server.token,
                "mine",
            )
            assert running.pids.nats is None
            assert chat(running).strip()
            assert running.stop() == 0
        assert server.pid is not None  # it was there before, and stays
    finally:
        server.stop()
