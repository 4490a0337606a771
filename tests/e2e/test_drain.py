"""A deployment told to stop finishes what it has begun, admits nothing new, and exits with status 0."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dalsegno.config import environment
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running

LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}


def dropped_after(client: httpx.AsyncClient) -> asyncio.Task[int]:
    """The first status that is a refusal of a new request."""

    async def ask() -> int:
        while True:
            answer = await client.post("/generate", json={"text": "late", "streaming": False})
            if answer.status_code != 200:
                assert answer.headers["connection"] == "close"
                assert int(answer.headers["retry-after"]) > 0
                assert answer.json()["error"]["code"] == "shutting_down"
                return answer.status_code

    return asyncio.create_task(ask())


async def finishes_while_told_to_stop(url: str, tell: Any) -> tuple[Answer, int, dict[str, Any]]:
    """Stop during a long answer; return the answer, a new request's response, and the health."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        answer = Answer("long")
        asking = tasks.create_task(clients.generate(client, answer, "What does len do?", **LONG))
        await answer.under_way.wait()
        tell()
        refused = await dropped_after(client)
        health = (await client.get("/health")).json()
    return asking.result(), refused, health


def test_a_deployment_that_gets_sigterm_finishes_its_answers(random_demo: Running) -> None:
    def tell() -> None:
        random_demo.launcher.send_signal(signal.SIGTERM)

    answer, refused, health = asyncio.run(finishes_while_told_to_stop(random_demo.url, tell))

    assert random_demo.launcher.wait(deploy.STOP_SECONDS) == 0
    assert len(answer.token_ids) == LONG["max_tokens"]
    assert answer.end["finish_reason"] == "length"
    assert refused == 503
    assert (health["state"], health["gateway"]["state"]) == ("draining", "draining")


@pytest.fixture
def random_demo(tmp_path: Path) -> Iterator[Running]:
    with deploy.serve(tmp_path) as running:
        yield running


@contextmanager
def gateway(running: Running, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another gateway of a deployment, as its own process; the process and its URL."""
    told = environment.of(running.client)
    command = [sys.executable, "-m", "dalsegno", "gateway", "--config", "demo", "--port", "0"]
    command += ["--nats", running.nats_url, "--prefix", running.prefix, "--log-format", "json", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **told}) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                message = json.loads(line)["message"]
                if message.startswith("listening on "):
                    url = message.removeprefix("listening on ")
                    _wait_until_ready(url)
                    yield process, url
                    break
        finally:
            process.kill()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + clients.PATIENCE_S
    while httpx.get(f"{url}/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # health is asked, it does not tell


def test_a_gateway_that_gets_sigterm_finishes_its_answers(deployment: Running) -> None:
    with gateway(deployment) as (process, url):
        answer, refused, health = asyncio.run(finishes_while_told_to_stop(url, process.terminate))
        assert process.wait(deploy.STOP_SECONDS) == 0

    assert len(answer.token_ids) == LONG["max_tokens"]
    assert refused == 503
    assert health["state"] == "draining"


def test_a_client_that_takes_nothing_does_not_hold_a_gateway_up(deployment: Running) -> None:
    with gateway(deployment, "--set", "gateway.drain_s=0.5") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            body = json.dumps({"text": "x", "model_kwargs": LONG}).encode()
            idle.sendall(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            idle.recv(1)  # it has begun
            begun_s = time.monotonic()
            process.terminate()
            assert process.wait(deploy.STOP_SECONDS) == 0
            took_s = time.monotonic() - begun_s

    assert took_s < 15


def test_a_gateway_that_cannot_be_says_why_as_every_line(deployment: Running) -> None:
    told = environment.of(deployment.client)
    ended = clients.run(
        "gateway", "--config", "demo", "--nats", deployment.nats_url, "--prefix", deployment.prefix,
        "--host", "192.0.2.1", "--log-format", "json", env=told,
    )  # fmt: skip

    assert ended.returncode == 78
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (last["level"], last["role"]) == ("critical", "gateway")
    assert "192.0.2.1" in last["message"]
