"""Incidents of a deployment, each explained by one command that names the cause."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.events import NodeReady, RequestFinished, RequestRejected, RequestSubmitted
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint
from tests.tiny.families import installed
from tests.tiny.orpheus import tiny_orpheus

pytestmark = pytest.mark.timeout(300)
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}


def why(running: Running, request_id: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    ended = clients.run_on(running, "why", request_id, "--json", env=env)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)
    assert found["decisions"]["matches"]
    return found


def part_of(found: dict[str, Any], kind: str) -> dict[str, Any]:
    parts = [part for part in found["parts"] if part["kind"] == kind]
    assert parts, [part["kind"] for part in found["parts"]]
    return max(parts, key=lambda part: float(part["seconds"]))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One place, and one more request may wait."""
    told = ("--set", "max_concurrent_requests=1", "--set", "scheduling.max_waiting=1")
    folder = tmp_path_factory.mktemp("narrow")
    with deploy.serve(folder, *told, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


async def test_a_request_that_waits_for_a_place_names_who_had_it(narrow: Running) -> None:
    """And one that is refused, because too many wait, names those that ran and waited."""
    async with clients.http(narrow) as http, clients.reader(narrow) as reader:
        first, second = Answer("first", awaited_tokens=10), Answer("second")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.generate(http, first, "One", **LONG))
            await first.under_way.wait()
            tasks.create_task(clients.generate(http, second, "Two", **LONG))
            await reader.until(reader.subjects.request("second"), RequestSubmitted)
            refused = await http.post("/generate", json=clients.body("Three", "third", **LONG))
            assert refused.status_code == 429, refused.text
        await reader.until(reader.subjects.walk("third"), RequestRejected)
    found = why(narrow, "second")
    waited = part_of(found, "admission")
    assert waited["requests"] == ["first"]
    assert "waited for a place behind first" in waited["text"]
    assert waited["share"] > 0.1
    lines = clients.run_on(narrow, "why", "third").stdout
    assert "rejected, queue_full" in lines
    assert "then ran: first" in lines
    assert "then waited: second" in lines


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One place in the engine's batch, although the conductor admits more."""
    folder = tmp_path_factory.mktemp("small")
    told = ("--set", "model_kwargs.max_sequences=1")
    with deploy.serve(folder, *told, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


async def test_a_slow_request_behind_a_long_neighbour_names_it(small: Running) -> None:
    async with clients.http(small) as http, clients.reader(small) as reader:
        long, short = Answer("long", awaited_tokens=10), Answer("short")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(clients.generate(http, long, "One", **LONG))
            await long.under_way.wait()
            tasks.create_task(clients.generate(http, short, "Two", temperature=0, max_tokens=4))
        await reader.until(reader.subjects.walk("short"), RequestFinished)
    waited = part_of(why(small, "short"), "queue")

    assert waited["requests"] == ["long"]
    assert waited["text"] == "llm on rank 0 waited for a place in the batch behind long"
    assert waited["rank"] == 0
    lines = clients.run_on(small, "log", "short").stdout
    assert "llm waited" in lines or waited["seconds"] < 0.1


async def test_a_preempted_request_names_who_took_its_blocks(tmp_path: Path) -> None:
    told = ("--set", "kv_tokens=256", "--set", "model_kwargs.prefix_cache=false")
    with deploy.serve(tmp_path, *told, model=str(tiny_checkpoint("qwen3"))) as running:
        async with clients.http(running) as http, clients.reader(running) as reader:
            await clients.answers(http, ["One", "Two"], "r", at_once=2, **LONG)
            for name in ("r-0", "r-1"):
                await reader.until(reader.subjects.walk(name), RequestFinished)
        explained = [why(running, name) for name in ("r-0", "r-1")]
    preempted = [
        (one["request_id"], part) for one in explained for part in one["parts"] if part["kind"] == "preempted"
    ]

    assert preempted
    for request_id, part in preempted:
        assert part["requests"] == ["r-0" if request_id == "r-1" else "r-1"]
        assert "tokens computed again" in part["text"]


async def test_a_killed_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    with deploy.serve(tmp_path, model=str(tiny_checkpoint("qwen3"))) as running:
        async with clients.http(running) as http, clients.reader(running) as reader:
            answer = Answer("cut", awaited_tokens=30)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(clients.generate(http, answer, "One", **LONG))
                await answer.under_way.wait()
                killed = running.pids.worker["0"]
                os.kill(killed, signal.SIGKILL)
            await reader.until(reader.subjects.walk("cut"), RequestFinished)
        found = why(running, "cut")
        lines = clients.run_on(running, "log", "cut").stdout
    away = part_of(found, "away")

    assert found["attempts"] == 2
    assert away["rank"] == 0
    assert "without rank 0 (killed by SIGKILL" in away["text"]
    assert part_of(found, "lost")["seconds"] > 0
    assert f"process {killed} before it was killed by SIGKILL" in lines
    assert "worker.lost" in lines or "worker.joined" in lines


async def test_a_stalled_vocoder_is_named(tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    stall.touch()
    configuration = tmp_path / "stalling.yaml"
    configuration.write_text(
        yaml.safe_dump(
            {
                "model": "stalling",
                "checkpoint": str(tiny_orpheus()),
                "max_seq_len": 2048,
                "node_groups": [
                    {"node_names": ["prepare", "LLM"], "ranks": [0]},
                    {"node_names": ["snac_decoder"], "ranks": [1]},
                ],
            }
        )
    )
    around = installed("stalling", tmp_path) | {"STALLING_FILE": str(stall)}
    with deploy.serve(tmp_path, model=str(configuration), env=around) as running:
        async with clients.http(running) as http, clients.reader(running) as reader:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            asked = {"model": model, "input": "hello there", "voice": "tara", "request_id": "mute"}
            async with asyncio.TaskGroup() as tasks:
                saying = tasks.create_task(
                    http.post("/v1/audio/speech", json=asked | {"response_format": "pcm"})
                )
                ready = await reader.until(reader.subjects.ready(0, "mute"), NodeReady)
                assert isinstance(ready[-1], NodeReady)
                heartbeat = reader.subjects.heartbeat("worker", "1")
                for _ in range(4):  # two seconds
                    await reader.said(heartbeat, bool)
                stall.unlink()
            assert saying.result().status_code == 200, saying.result().text
            await reader.until(reader.subjects.walk("mute"), RequestFinished)
        found = why(running, "mute", around)

    assert found["cause"]["kind"] == "node"
    assert found["cause"]["text"].startswith("snac_decoder on rank 1 computed")
    assert found["cause"]["rank"] == 1
    assert found["cause"]["share"] > 0.5


async def test_a_bundle_is_explained_without_a_server(small: Running, tmp_path: Path) -> None:
    async with clients.http(small) as http, clients.reader(small) as reader:
        await clients.answers(http, ["Five"], "five", at_once=1, temperature=0, max_tokens=4)
        await reader.until(reader.subjects.walk("five-0"), RequestFinished)
    file = tmp_path / "five.bundle"
    assert clients.run_on(small, "export", "five-0", "-o", str(file)).returncode == 0
    live, offline = why(small, "five-0"), json.loads(clients.run("why", str(file), "--json").stdout)

    assert offline["parts"] == live["parts"]
    ended = clients.run("why", "nothing-like-this", "--data-dir", str(small.data_dir))
    assert (ended.returncode, "nothing-like-this" in ended.stderr) == (1, True)
