"""LLaDA on two ranks and Dream on one, served by real processes: as the published samplers say."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from openai import OpenAI

from models.masked_diffusion.nodes import load
from shared.events import NodeReady, OutputChunk
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer, Reader
from tests.e2e.deploy import Running
from tests.models.masked_diffusion import naive
from tests.tiny.masked_diffusion import MASK_ID, tiny_dream, tiny_llada

BLOCK: Final = 8
TOKENS: Final = 32
LONG: Final = 192
ASKED: Final[dict[str, Any]] = {"max_tokens": TOKENS, "block_length": BLOCK, "ignore_eos": True}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "steps": {"diffusion_steps": 16},
    "guided": {"cfg_scale": 1.0, "steps": 8},
    "threshold": {"threshold": 0.2},
}
"""By request, its options: some under the names that other servers have for them."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "llada.yaml"
    settings = {
        "model": "masked_diffusion",
        "checkpoint": str(tiny_llada()),
        "max_seq_len": 512,
        "model_kwargs": {"dtype": "float32"},
        "node_groups": [
            {"node_names": ["prepare"], "ranks": [0]},
            {"node_names": ["llm"], "ranks": [1]},
        ],
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def llada(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("llada"), model=str(config)) as running:
        yield running


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("dream"), model=str(tiny_dream())) as running:
        yield running


@cache
def forward(folder: Path) -> naive.Forward:
    return naive.forward_of(load(folder, dtype="float32").model, MASK_ID)


async def ask(client: httpx.AsyncClient, answer: Answer, text: str = "", **params: Any) -> Answer:
    given = {**ASKED, **params}
    return await clients.generate(client, answer, text or f"Tell me of {answer.request_id}.", **given)


async def prompt_of(reader: Reader, request_id: str) -> list[int]:
    events = await reader.events(request_id)
    order = next(e for e in events if isinstance(e, NodeReady) and e.walks[0].name == "prefill")
    return list(read_ids(order.walks[0].inputs["token_ids"]))


async def test_answers_at_once_are_each_as_the_published_sampler_says(llada: Running) -> None:
    async with clients.http(llada) as client, asyncio.TaskGroup() as tasks:
        asked = {
            name: tasks.create_task(ask(client, Answer(name), **options)) for name, options in OPTIONS.items()
        }

    published: dict[str, dict[str, Any]] = {
        "plain": {"steps": TOKENS},
        "steps": {"steps": 16},
        "guided": {"steps": 8, "cfg_scale": 1.0},
        "threshold": {"steps": TOKENS, "threshold": 0.2},
    }
    async with clients.reader(llada) as reader:
        for name, options in published.items():
            prompt = await prompt_of(reader, name)
            wanted = naive.llada(
                forward(tiny_llada()), prompt, MASK_ID, gen_length=TOKENS, block_length=BLOCK, **options
            )
            answer = asked[name].result()
            assert answer.token_ids == wanted.ids
            assert answer.end["usage"]["counts"]["forwards"] == wanted.forwards
            assert len(set(answer.token_ids)) > 4, "the control: it says different things"


async def test_an_answer_survives_its_worker_in_the_middle_of_a_block_and_replays(
    llada: Running, config: Path
) -> None:
    pid = llada.pids.worker["1"]
    assert pid is not None
    answer = Answer("killed", awaited_tokens=2 * BLOCK)
    asked: dict[str, Any] = {"text": "Tell me of death.", "max_tokens": LONG}
    async with clients.http(llada) as client:
        undisturbed = await ask(client, Answer("undisturbed"), **asked)
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(ask(client, answer, **asked))
            await answer.under_way.wait()
            os.kill(pid, signal.SIGKILL)
            assert not streamed.done()

    assert (answer.text, answer.token_ids) == (undisturbed.text, undisturbed.token_ids)
    async with clients.reader(llada) as reader:
        chunks = [event for event in await reader.events("killed") if isinstance(event, OutputChunk)]
    assert len({chunk.attempt for chunk in chunks}) == 2, "the control: the second attempt wrote, too"
    assert all(len(chunk.token_ids) % BLOCK == 0 for chunk in chunks), "whole blocks"
    assert answer.indices == list(range(len(answer.indices))), "one stream, nothing twice"
    replayed = clients.run_on(llada, "replay", "killed", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout


def test_openais_client_takes_chats_and_completions_in_blocks(dream: Running) -> None:
    client = OpenAI(base_url=f"{dream.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question: Any = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me of dreams."}],
        "max_tokens": 24,
        "extra_body": {"block_size": BLOCK, "alg": "topk_margin", "ignore_eos": True},
    }

    whole = client.chat.completions.create(**question)
    pieces = [
        chunk.choices[0].delta.content
        for chunk in client.chat.completions.create(**question, stream=True)
        if chunk.choices and chunk.choices[0].delta.content
    ]
    completed = client.completions.create(
        model=model, prompt="Tell me", max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )

    assert "".join(pieces) == whole.choices[0].message.content
    assert 1 < len(pieces) <= 3, "a piece for each block"
    assert completed.usage is not None
    assert completed.usage.completion_tokens == TOKENS


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "guide"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"steps": 7, "block_length": 8, "max_tokens": 16}, "steps"),
        ({"remasking": "best"}, "remasking"),
        ({"apd": True}, "verifier"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(dream: Running, params: dict[str, Any], param: str) -> None:
    model = httpx.get(f"{dream.url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 16, **params}

    refused = httpx.post(f"{dream.url}/v1/chat/completions", json=body, timeout=60)

    assert refused.status_code == 400, refused.text
    assert param in refused.json()["error"]["message"]
