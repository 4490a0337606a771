"""A checkpoint is replaced between a worker's death and its restart: no answer has two authors (ADR 27)."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.events import (
    AnyEvent,
    NodeReady,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestResumed,
    WorkerJoined,
)
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import write_checkpoint

TOKENS = 400
TEXT = "Tell me a long story about wizards."
PARAMS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


@dataclass(slots=True)
class Stream:
    """One answer of `/generate`: its tokens, and the last line, which tells the end or the error."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, http: httpx.AsyncClient) -> None:
        body = clients.body(TEXT, self.request_id, **PARAMS)
        async with http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                self.last = json.loads(line)
                self.token_ids += self.last.get("metadata", {}).get("token_ids", [])
                if len(self.token_ids) >= TOKENS // 8:
                    self.under_way.set()


@dataclass(slots=True)
class Swapped:
    """A deployment of a checkpoint, and another checkpoint to replace parts of it with."""

    running: Running
    served: Path
    other: Path

    def replace(self, name: str) -> None:
        """Exchange a file of both checkpoints, each by a rename."""
        served, other, aside = self.served / name, self.other / name, self.other / f"{name}.aside"
        served.rename(aside)
        other.rename(served)
        aside.rename(other)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.running.pids.worker["0"], number)

    async def interrupted(self, request_id: str, *replaced: str) -> Stream:
        """The answer to a request whose worker is killed in the middle, and starts with other files."""
        stream = Stream(request_id)
        async with clients.http(self.running) as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read(http))
            await stream.under_way.wait()
            self.signal(signal.SIGSTOP)
            for name in replaced:
                self.replace(name)
            self.signal(signal.SIGKILL)
        assert len(stream.token_ids) >= TOKENS // 8
        await clients.wait_until_ready(self.running)
        return stream

    async def answer(self, request_id: str) -> list[int]:
        """The tokens of an undisturbed answer."""
        stream = Stream(request_id)
        async with clients.http(self.running) as http:
            await stream.read(http)
        return stream.token_ids

    async def events(self, request_id: str) -> list[AnyEvent]:
        async with clients.reader(self.running) as reader:
            return await reader.events(request_id)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swapped]:
    served = write_checkpoint(tmp_path_factory.mktemp("served"), "qwen3", seed=1)
    other = write_checkpoint(tmp_path_factory.mktemp("other"), "qwen3", seed=2)
    with deploy.serve(tmp_path_factory.mktemp("swapped"), model=str(served)) as running:
        yield Swapped(running, served, other)


async def test_an_answer_that_was_begun_fails_by_name(swapped: Swapped) -> None:
    stream = await swapped.interrupted("begun", "model.safetensors")

    assert len(stream.token_ids) < TOKENS
    assert "weights_changed" in json.dumps(stream.last)
    *_, end = await swapped.events(stream.request_id)
    assert isinstance(end, RequestFailed)
    assert end.failure.code == "weights_changed"
    assert "send the request again" in end.failure.message


async def test_a_write_into_the_served_weights_ends_the_worker(swapped: Swapped) -> None:
    """As `cp` over the file does: on a CPU, tensors are its pages, so the next token would be of both."""
    stream = Stream("written")
    path, pid = swapped.served / "model.safetensors", swapped.running.pids.worker["0"]
    async with clients.http(swapped.running) as http, asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.read(http))
        await stream.under_way.wait()
        old, new = path.read_bytes(), (swapped.other / path.name).read_bytes()
        with path.open("r+b") as file:
            file.write(new)
    (swapped.other / path.name).write_bytes(old)
    assert len(stream.token_ids) < TOKENS
    assert "weights_changed" in json.dumps(stream.last)
    await clients.wait_until_ready(swapped.running)
    assert swapped.running.pids.worker["0"] != pid
    assert "was written to while it was served" in swapped.running.log()


async def test_an_answer_of_which_nothing_was_released_is_wholly_the_new_models(swapped: Swapped) -> None:
    old = await swapped.answer("old")
    stream = Stream("not-begun")
    async with clients.http(swapped.running) as http, clients.reader(swapped.running) as reader:
        swapped.signal(signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read(http))
            await reader.until(reader.subjects.ready(0, stream.request_id), NodeReady)
            swapped.replace("model.safetensors")
            swapped.signal(signal.SIGKILL)
    await clients.wait_until_ready(swapped.running)
    new = await swapped.answer("new")

    assert stream.token_ids == new != old
    events = await swapped.events(stream.request_id)
    [admitted] = [event for event in events if isinstance(event, RequestAdmitted)]
    [resumed] = [event for event in events if isinstance(event, RequestResumed)]
    assert admitted.weights.keys() == resumed.weights.keys() == {"llm", "prepare"}
    assert admitted.weights["llm"] != resumed.weights["llm"]
    assert admitted.weights["prepare"] == resumed.weights["prepare"]


async def test_the_same_checkpoint_continues_the_answer(swapped: Swapped) -> None:
    undisturbed = await swapped.answer("undisturbed")
    weights = swapped.served / "model.safetensors"
    (swapped.other / "model.safetensors.same").write_bytes(weights.read_bytes())
    (swapped.other / "model.safetensors.same").replace(weights)  # another file with the same bytes

    stream = await swapped.interrupted("same")

    assert stream.token_ids == undisturbed
    assert isinstance((await swapped.events("same"))[-1], RequestFinished)


async def test_joins_name_the_weights_and_the_log_replays(swapped: Swapped) -> None:
    async with clients.reader(swapped.running) as reader:
        _, joined = await reader.until(reader.subjects.worker(0), WorkerJoined)
    assert joined.node_weights.keys() == {"llm", "prepare"}
    assert len(joined.weights) == 64
    replayed = clients.run_on(swapped.running, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout
