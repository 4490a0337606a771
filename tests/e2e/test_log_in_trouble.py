"""The log hangs or fills up: new requests are refused at once, running ones end."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

TOKENS = 300
PARAMS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
TEXT = "Tell me a long story."
MAX_BYTES = 8 << 20
FILLER = bytes(256 << 10)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(
        tmp_path_factory.mktemp("trouble"),
        "--set",
        f"nats.max_bytes={MAX_BYTES}",
        model=str(tiny_checkpoint("qwen3")),
    ) as running:
        yield running


async def refused(client: httpx.AsyncClient, model: str) -> list[tuple[int, str | None, str, float]]:
    """Each route's response to a new request: status, retry time, code, and duration."""
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    said = []
    for path, body in (
        ("/generate", {"text": "hi", "model_kwargs": {"max_tokens": 2}}),
        ("/generate", clients.body("hi", f"new-{time.monotonic_ns()}", max_tokens=2)),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 2}),
    ):
        begun_s = time.monotonic()
        response = await client.post(path, json=body)
        took_s = time.monotonic() - begun_s
        code = response.json()["error"]["code"]
        said.append((response.status_code, response.headers.get("retry-after"), code, took_s))
    return said


async def model_of(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    while not has_stopped(pid):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.001)


def has_stopped(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(") ")[2].startswith("T") for thread in threads)


async def missing(client: httpx.AsyncClient) -> list[str]:
    return list((await client.get("/health")).json()["missing"])


async def test_while_nats_hangs_every_route_says_so_at_once_and_what_runs_ends(running: Running) -> None:
    nats = running.pids.nats
    assert nats is not None
    answer = Answer("hangs", awaited_tokens=TOKENS // 8)
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        model = await model_of(client)
        asking = tasks.create_task(clients.generate(client, answer, TEXT, **PARAMS))
        await answer.under_way.wait()
        await stop(nats)
        try:
            first = await refused(client, model)  # of these, one may have had to find out
            said = await refused(client, model)
        finally:
            os.kill(nats, signal.SIGCONT)
        await asking
        await clients.wait_until_ready(running)
        after = await client.post("/generate", json=clients.body("hi", "after", max_tokens=2))

    assert {one[:3] for one in first + said} == {(503, "2", "log_unavailable")}
    assert max(one[3] for one in said) < 4, "they waited for an ack"
    assert answer.end["usage"]["completion_tokens"] == len(answer.token_ids) == TOKENS
    assert after.status_code == 200


async def test_a_log_that_fills_up_takes_nothing_new_and_lets_end_what_runs(running: Running) -> None:
    answer = Answer("fills", awaited_tokens=TOKENS // 8)
    async with (
        clients.http(running) as client,
        clients.service(running) as service,
        asyncio.TaskGroup() as tasks,
    ):
        model = await model_of(client)
        asking = tasks.create_task(clients.generate(client, answer, TEXT, **PARAMS))
        await answer.under_way.wait()
        for _ in range(MAX_BYTES // len(FILLER) // 2 + 1):
            await service.publish("ds.control.filler", FILLER)
        while "the log is nearly full (" not in str(await missing(client)):  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)  # health is asked, it does not tell
        said = await refused(client, model)
        await asking

    assert {one[:3] for one in said} == {(503, "2", "log_full")}
    assert answer.end["usage"]["completion_tokens"] == len(answer.token_ids) == TOKENS
    assert "no new requests are accepted, running requests continue" in running.log()
