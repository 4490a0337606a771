"""LoRA adapters over the real command line: addressed, mixed, loaded and unloaded, killed, replayed."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.checkpoints.adapters import WEIGHTS
from shared.adapters import Adapter
from shared.events import AdapterLoaded, NodeReady, OutputFence, RequestAdmitted
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint
from tests.tiny.adapters import generate, make_adapter, merged

PROMPT = list(range(20, 60))
TOKENS = 24


@dataclass(frozen=True)
class World:
    running: Running
    config: str
    sql: Adapter
    poet: Adapter

    def expected(self, adapter: Adapter | None, tokens: int = TOKENS) -> list[int]:
        return generate(merged(tiny_checkpoint("qwen3"), adapter), PROMPT, tokens)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A deployment with the adapter `sql`; `poet` is loaded by tests."""
    folder, checkpoint = tmp_path_factory.mktemp("adapters"), tiny_checkpoint("qwen3")
    sql = make_adapter(folder / "sql", checkpoint, seed=1)
    poet = make_adapter(folder / "poet", checkpoint, seed=2, rank=2, size=0.4)
    (folder / "tiny.yaml").write_text(
        f"model: decoder_lm\nname: tiny\ncheckpoint: {checkpoint}\nmax_seq_len: 512\n"
        "node_groups: [{node_names: [prepare, llm], ranks: [0]}]\n"
        "model_kwargs: {dtype: float32}\n"
        "adapters: {sql: sql}\nadapters_at_runtime: true\n"
    )
    with deploy.serve(folder, model=str(folder / "tiny.yaml")) as running:
        yield World(running, str(folder / "tiny.yaml"), sql, poet)


async def ask(http: httpx.AsyncClient, model: str, name: str, tokens: int = TOKENS) -> Answer:
    answer = Answer(name, awaited_tokens=tokens // 4)
    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    body = {"token_ids": PROMPT, "model": model, "request_id": name, "model_kwargs": params}
    async with http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            answer.take(json.loads(line))
    return answer


async def load(http: httpx.AsyncClient, adapter: Adapter, **more: Any) -> httpx.Response:
    body = {"lora_name": adapter.name, "lora_path": adapter.folder, **more}
    return await http.post("/v1/load_lora_adapter", json=body)


async def test_configured_and_loaded_adapters_and_the_model_answer_in_one_batch(world: World) -> None:
    async with clients.http(world.running) as http:
        loaded = await load(http, world.poet)
        assert (loaded.status_code, loaded.json()["digest"]) == (200, world.poet.digest)
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one.get("digest")) for one in listed] == [
            ("tiny", None),
            ("tiny:poet", world.poet.digest),
            ("tiny:sql", world.sql.digest),
        ]
        models = {"tiny": None, "tiny:sql": world.sql, "tiny:poet": world.poet}
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(http, model, f"mixed-{n}")) for n, model in enumerate(models)]
    for task, adapter in zip(asked, models.values(), strict=True):
        assert task.result().token_ids == world.expected(adapter)
    async with clients.reader(world.running) as reader:
        events = await reader.events("mixed-2")
    assert [one.adapter for one in events if isinstance(one, RequestAdmitted)] == [world.poet]
    assert {one.adapter for one in events if isinstance(one, NodeReady)} == {world.poet}


async def test_openai_routes_answer_in_the_adapters_name(world: World) -> None:
    async with clients.http(world.running) as http:
        body: dict[str, Any] = {"model": "tiny:sql", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["model"] == "tiny:sql"
        one = (await http.get("/v1/models/tiny:sql")).json()
        assert (one["parent"], one["root"]) == ("tiny", world.sql.folder)
        for model in ("tiny:nobody", "sql", "other:sql", "tiny:"):
            for route, more in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
                refused = await http.post(f"/v1/{route}", json={"model": model, **more})
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_cannot_be_loaded_is_refused_and_changes_nothing(world: World, tmp_path: Path) -> None:
    damaged = shutil.copytree(world.poet.folder, tmp_path / "damaged")
    (damaged / WEIGHTS).write_bytes((damaged / WEIGHTS).read_bytes()[:-10])

    def codes(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["code"]

    async with clients.http(world.running) as http:
        before = (await http.get("/v1/models")).json()
        body = {"lora_name": "damaged", "lora_path": str(damaged)}
        refused = await http.post("/v1/load_lora_adapter", json=body)
        assert codes(refused) == (400, "invalid_adapter")
        assert "not whole" in refused.json()["error"]["message"]
        for wrong, expected in (
            ({**body, "lora_path": "poet"}, (400, "invalid_value")),
            ({**body, "lora_name": "a:b"}, (400, "invalid_value")),
            ({**body, "lora_path": str(tmp_path / "none")}, (400, "invalid_adapter")),
            ({**body, "path": "x"}, (400, "unknown_parameter")),
            ({**body, "lora_name": "sql"}, (409, "adapter_conflict")),
        ):
            assert codes(await http.post("/v1/load_lora_adapter", json=wrong)) == expected
        for name, expected in (("nobody", (404, "model_not_found")), ("sql", (409, "adapter_conflict"))):
            refused = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert codes(refused) == expected
        assert (await http.get("/v1/models")).json() == before


async def test_a_request_whose_adapter_cannot_be_read_fails_and_others_go_on(
    world: World, tmp_path: Path
) -> None:
    folder = shutil.copytree(world.sql.folder, tmp_path / "gone")
    other = make_adapter(tmp_path / "other", tiny_checkpoint("phi3"), seed=1, modules=("qkv_proj",))
    async with clients.http(world.running) as http:
        make_adapter(folder, tiny_checkpoint("qwen3"), seed=9)
        for adapter in (Adapter(name="gone", digest="", folder=str(folder)), other):
            assert (await load(http, adapter)).status_code == 200
        shutil.rmtree(folder)
        for name, why in (("gone", "cannot be read"), ("other", "made for another model")):
            refused = await http.post("/v1/completions", json={"model": f"tiny:{name}", "prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
            assert why in refused.json()["error"]["message"]
            await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert (await ask(http, "tiny:sql", "goes-on")).token_ids == world.expected(world.sql)


async def test_a_killed_worker_continues_with_the_adapter_of_the_request(world: World) -> None:
    """Also if the adapter's name stands for other weights meanwhile, and then for none."""
    tokens = 300
    async with clients.http(world.running) as http, asyncio.TaskGroup() as tasks:
        assert (await load(http, world.poet, load_inplace=True)).status_code == 200
        answer = Answer("killed", awaited_tokens=tokens // 4)
        params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        body = {"token_ids": PROMPT, "model": "tiny:poet", "request_id": "killed", "model_kwargs": params}

        async def stream() -> None:
            async with http.stream("POST", "/generate", json=body) as response:
                async for line in response.aiter_lines():
                    answer.take(json.loads(line))

        tasks.create_task(stream())
        await answer.under_way.wait()
        other = Adapter(name="poet", digest="", folder=world.sql.folder)
        assert (await load(http, other)).json()["error"]["code"] == "adapter_conflict"
        assert (await load(http, other, load_inplace=True)).status_code == 200
        unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
        assert unloaded.json() == {"id": "tiny:poet", "object": "adapter", "deleted": True}
        os.kill(world.running.pids.worker["0"], signal.SIGKILL)
    assert answer.token_ids == world.expected(world.poet, tokens)
    async with clients.reader(world.running) as reader:
        events = await reader.events("killed")
    assert any(isinstance(one, OutputFence) for one in events), "the kill came too late"
    async with clients.http(world.running) as http:
        refused = await http.post("/v1/completions", json={"model": "tiny:poet", "prompt": "a"})
    assert refused.status_code == 404


async def test_replays_reproduce_the_answer_or_say_that_the_weights_are_gone(
    world: World, tmp_path: Path
) -> None:
    folder = shutil.copytree(world.poet.folder, tmp_path / "brief")
    adapter = Adapter(name="brief", digest=world.poet.digest, folder=str(folder))
    async with clients.http(world.running) as http:
        assert (await load(http, adapter)).json()["digest"] == world.poet.digest
        answer = await ask(http, "tiny:brief", "replayed")
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "brief"})).status_code == 200
    assert answer.token_ids == world.expected(world.poet)
    everything = clients.run_on(world.running, "replay", "--all")
    assert everything.returncode == 0, everything.stdout
    again = clients.run_on(world.running, "replay", "replayed", "--execute", "--config", world.config)
    assert again.returncode == 0, again.stdout + again.stderr
    (folder / WEIGHTS).write_bytes((Path(world.sql.folder) / WEIGHTS).read_bytes())
    gone = clients.run_on(world.running, "replay", "replayed", "--execute", "--config", world.config)
    assert gone.returncode != 0
    assert "invalid_adapter" in gone.stderr + gone.stdout
    shutil.rmtree(folder)
    gone = clients.run_on(world.running, "replay", "replayed", "--execute", "--config", world.config)
    assert gone.returncode != 0
    assert "brief" in gone.stderr + gone.stdout


async def test_prefill_and_decode_on_two_ranks_use_the_same_adapter(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    sql = make_adapter(tmp_path / "sql", checkpoint, seed=1)
    (tmp_path / "tiny.yaml").write_text(
        f"model: decoder_lm\nname: tiny\ncheckpoint: {checkpoint}\nmax_seq_len: 512\n"
        "node_groups:\n"
        "- {node_names: [prepare], ranks: [0]}\n"
        "- {node_names: [llm], ranks: [0], graph_walks: [prefill, score]}\n"
        "- {node_names: [llm], ranks: [1], graph_walks: [decode]}\n"
        "model_kwargs: {dtype: float32}\nadapters: {sql: sql}\n"
    )
    with deploy.serve(tmp_path, model=str(tmp_path / "tiny.yaml")) as running:
        async with clients.http(running) as http:
            found = (await ask(http, "tiny:sql", "split")).token_ids
    assert found == generate(merged(checkpoint, sql), PROMPT, TOKENS)


async def test_after_a_restart_loaded_adapters_are_there_again(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    poet = make_adapter(tmp_path / "poet", checkpoint, seed=2, rank=2, size=0.4)
    for start in range(2):
        with deploy.serve(tmp_path, "--set", "adapters_at_runtime=true", model=str(checkpoint)) as running:
            async with clients.http(running) as http:
                name = (await http.get("/v1/models")).json()["data"][0]["id"]
                if not start:
                    assert (await load(http, poet)).status_code == 200
                answer = await ask(http, f"{name}:poet", f"start-{start}")
            assert answer.token_ids == generate(merged(checkpoint, poet), PROMPT, TOKENS)
            async with clients.reader(running) as reader:
                subject = reader.subjects.adapter("poet")
                _, loaded = await reader.until(subject, AdapterLoaded)
            assert loaded.adapter == poet


def test_a_damaged_adapter_in_the_configuration_stops_the_start(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    make_adapter(tmp_path / "poet", checkpoint, seed=2)
    (tmp_path / "poet" / WEIGHTS).unlink()
    ended = clients.run("check", str(checkpoint), "--set", f"adapters.poet={tmp_path / 'poet'}")
    assert ended.returncode != 0
    assert "adapters: adapter " in ended.stderr
    assert "cannot be read" in ended.stderr
