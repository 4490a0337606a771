"""The log's store is lost or replaced by an older copy: all roles report it, no client waits for ever.

Acked events are lost with the store. Clients get their own error code; a repeated request is a new one, on a
new log.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

PARAMS = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
STREAMS = 4
ROLES = ("gateway", "conductor", "worker-0")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("lost"), model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


def kill_nats(running: Running) -> None:
    assert running.pids.nats is not None
    os.kill(running.pids.nats, signal.SIGKILL)


@asynccontextmanager
async def patience(running: Running) -> AsyncGenerator[None, None]:
    """Wait no longer than a client would; then show the roles' output."""
    try:
        async with asyncio.timeout(clients.PATIENCE_S):
            yield
    except TimeoutError as error:
        raise AssertionError(running.log()) from error


def has_said(running: Running, role: str, words: str) -> bool:
    return any(line.startswith(role) and words in line for line in running.log().splitlines())


class Told:
    """Everything that a streaming client receives, to the last line."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.begun = asyncio.Event()
        self.error: dict[str, Any] = {}

    async def ask(self, client: httpx.AsyncClient) -> None:
        asked = clients.body("Tell me a long story.", self.request_id, **PARAMS)
        async with client.stream("POST", "/generate", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                self.begun.set()
                piece = json.loads(line)
                if piece["modality"] == "error":
                    self.error = piece["metadata"]


async def test_with_its_store_lost_every_client_is_told_and_new_requests_are_served(running: Running) -> None:
    store = running.data_dir / "nats" / "jetstream"
    told = [Told(f"lost-{number}") for number in range(STREAMS)]
    async with clients.http(running) as client:
        async with patience(running), asyncio.TaskGroup() as tasks:
            for one in told:
                tasks.create_task(one.ask(client))
            for one in told:
                await one.begun.wait()
            shutil.rmtree(store, ignore_errors=True)
            kill_nats(running)
            shutil.rmtree(store, ignore_errors=True)  # what it wrote meanwhile
        await clients.wait_until_ready(running)
        again = await client.post("/generate", json=clients.body("hello", "lost-0", max_tokens=5))

    assert {one.error.get("code") for one in told} == {"log_regressed"}
    assert again.status_code == 200
    assert "the log has lost its stream" in running.log()
    assert clients.run_on(running, "replay", "--all").returncode == 0


async def test_an_older_copy_of_its_store_is_recognised(running: Running, tmp_path: Path) -> None:
    store, copy = running.data_dir / "nats" / "jetstream", tmp_path / "copy"
    async with clients.http(running) as client:
        await client.post("/generate", json=clients.body("hello", "before", max_tokens=5))
        kill_nats(running)
        shutil.copytree(store, copy)
        await clients.wait_until_ready(running)
        after = clients.body("hello", "after", max_tokens=5)
        assert (await client.post("/generate", json=after)).status_code == 200
        kill_nats(running)
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(copy, store, dirs_exist_ok=True)
        async with patience(running):
            for role in ROLES:
                while not has_said(running, role, "restored copy"):  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.05)
        await clients.wait_until_ready(running)
        again = await client.post("/generate", json=after)
        known = await client.get("/v1/requests/before")

    assert again.status_code == 200
    assert known.json()["status"] == "finished"
    replayed = clients.run_on(running, "replay", "--all")
    assert re.search(
        r"\b([23]) of \1 requests match", replayed.stdout
    )  # with that of the test before, if it ran
    # The history that was replaced may have been anchored in the moment before: what the anchor names is
    # another record now, or none.
    texts = ("is not the anchored one", "an anchor names a seal")
    was_anchored = any(text in replayed.stderr for text in texts)
    assert replayed.returncode == int(was_anchored)
