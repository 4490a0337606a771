"""A model whose KV node runs a program: pictures by passes over two contexts, beside answers in text.

Each picture is compared with a naive oracle, which computes every pass again under a mask, by transformers.
"""

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from models.transformers_lm.loader import load_decoder
from shared.events import NodeReady, OutputChunk
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import flow, tiny_checkpoint
from tests.tiny.flowing.nodes import CHANNELS, CHECKPOINT_STEPS, FlowLM
from tests.workers.kv_engine.programs.flow import oracle

PICTURES: Final = 12
LATENTS: Final = 7
LONG: Final = 80
"""Steps of a flow that lasts long enough to be killed in its middle."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return flow.environment(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(flow.configuration(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def running(
    environment: dict[str, str], config: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("flow"), model=config, env=environment) as running:
        yield running


@cache
def node() -> FlowLM:
    """The node of the deployment, for the oracle."""
    return FlowLM(load_decoder(tiny_checkpoint("qwen3"), "llm", dtype="float32"))


async def paint(client: httpx.AsyncClient, request_id: str, text: str, **options: Any) -> torch.Tensor:
    """Ask for a picture: (latents, channels)."""
    body = clients.body(text, request_id, latents=LATENTS, **options)
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert {line["modality"] for line in lines if line["metadata"].get("advisory")} <= {"progress"}
    picture, end = (line for line in lines if not line["metadata"].get("advisory"))
    assert end["metadata"]["finish_reason"] == "stop"
    numbers = np.frombuffer(base64.b64decode(picture["data"]), "<f4").copy()
    return torch.from_numpy(numbers.reshape(picture["metadata"]["shape"]))


def step_of(chunk: OutputChunk) -> int:
    """The step that a chunk of progress reports; 0 for another chunk."""
    return int(chunk.metadata.get("progress", {}).get("step", 0))


async def expected(running: Running, request_id: str, *, is_causal: bool = False) -> torch.Tensor:
    """The picture as the oracle computes it, from the request's order in the log."""
    async with clients.reader(running) as reader:
        order = next(
            event
            for event in await reader.events(request_id)
            if isinstance(event, NodeReady) and event.walks[0].name == "paint"
        )
    call = order.walks[0]
    generator = torch.Generator().manual_seed(order.seed % 2**63)
    noise = torch.randn(LATENTS, CHANNELS, generator=generator)
    ids = list(read_ids(call.inputs["token_ids"]))
    return oracle(node(), ids, noise, steps=call.args["steps"], is_causal=is_causal).sigmoid()


async def test_pictures_among_texts_are_each_as_the_oracle_says(running: Running) -> None:
    tell = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        texts = [
            tasks.create_task(clients.generate(client, Answer(f"text-{n}"), f"Tell me of {n}.", **tell))
            for n in range(4)
        ]
        pictures = [
            tasks.create_task(paint(client, f"picture-{n}", f"paint {n} cats", steps=2 + n % 2))
            for n in range(PICTURES)
        ]
    async with clients.http(running) as client:
        alone = await clients.generate(client, Answer("text-alone"), "Tell me of 2.", **tell)

    for number, picture in enumerate(pictures):
        found, wanted = picture.result(), await expected(running, f"picture-{number}")
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    causal = await expected(running, "picture-3", is_causal=True)
    assert float((pictures[3].result() - causal).abs().max()) > 0.02, "the control: another mask would show"
    assert texts[2].result().token_ids == alone.token_ids


async def test_a_picture_survives_its_worker_and_replays(
    running: Running, environment: dict[str, str], config: str
) -> None:
    pid = running.pids.worker["0"]
    assert pid is not None
    async with (
        clients.http(running) as client,
        clients.reader(running) as reader,
        asyncio.TaskGroup() as tasks,
    ):
        picture = tasks.create_task(paint(client, "killed", "paint a long time", steps=LONG))
        subject = reader.subjects.ready(0, "killed")
        await reader.until(subject, NodeReady, lambda order: order.walks[0].name == "paint")
        output = reader.subjects.outputs_of("killed")
        await reader.until(output, OutputChunk, lambda chunk: step_of(chunk) >= LONG // 2)
        os.kill(pid, signal.SIGKILL)
        assert not picture.done()
    async with clients.reader(running) as reader:
        chunks = [one for one in await reader.events("killed") if isinstance(one, OutputChunk)]

    torch.testing.assert_close(picture.result(), await expected(running, "killed"), atol=5e-3, rtol=5e-3)
    steps = {attempt: [step_of(one) for one in chunks if one.attempt == attempt] for attempt in (1, 2)}
    resumed = min(step for step in steps[2] if step)
    assert resumed >= LONG // 2, f"the second attempt went on after a checkpoint: {steps}"
    assert max(steps[2]) == LONG - CHECKPOINT_STEPS
    replayed = clients.run_on(running, "replay", "killed", "--execute", "--config", config, env=environment)
    assert replayed.returncode == 0, replayed.stdout
    assert "killed: " in replayed.stdout
