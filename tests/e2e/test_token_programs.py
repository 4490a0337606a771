"""Answers by a token program, served by real processes: as a naive oracle says, among others, and resumed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import httpx
import pytest

from models.transformers_lm.loader import load_decoder
from shared.events import NodeReady, OutputChunk, RequestFinished
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer, Reader
from tests.e2e.deploy import Running
from tests.tiny import infill, tiny_checkpoint
from tests.tiny.infilling.nodes import InfillLM
from tests.workers.kv_engine.programs.infill import WAYS, expected
from workers.kv_engine.sequence_spec import SequenceSpec

TOKENS: Final = 10
LONG: Final = 96
BLOCK: Final = 4


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return infill.environment(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(infill.configuration(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def running(
    environment: dict[str, str], config: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("infill"), model=config, env=environment) as running:
        yield running


@cache
def node() -> InfillLM:
    """The node of the deployment, for the oracle."""
    decoder, judge = (load_decoder(tiny_checkpoint("qwen3"), "llm", dtype="float32") for _ in range(2))
    return InfillLM(decoder, judge)


async def ask(client: httpx.AsyncClient, answer: Answer, text: str = "", **params: Any) -> Answer:
    given = {"max_tokens": TOKENS, "ignore_eos": True, "block": BLOCK, **params}
    return await clients.generate(client, answer, text or f"Tell me of {answer.request_id}.", **given)


async def by_oracle(reader: Reader, request_id: str) -> list[int]:
    """The tokens of an answer, from the request's order in the log."""
    events = await reader.events(request_id)
    order = next(e for e in events if isinstance(e, NodeReady) and e.walks[0].name == "prefill")
    call = order.walks[0]
    asked = SequenceSpec(
        key="",
        prompt_ids=list(read_ids(call.inputs["token_ids"])),
        max_tokens=call.args["max_tokens"],
        options=call.args["options"],
    )
    return expected(node(), asked)


async def chunks_of(reader: Reader, request_id: str) -> list[OutputChunk]:
    return [event for event in await reader.events(request_id) if isinstance(event, OutputChunk)]


async def test_answers_at_once_are_each_as_the_oracle_says(running: Running) -> None:
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        for_each = {
            f"{way}-{n}": tasks.create_task(ask(client, Answer(f"{way}-{n}"), way=way))
            for way in WAYS
            for n in range(3)
        }

    async with clients.reader(running) as reader:
        for request_id, task in for_each.items():
            answer = task.result()
            assert len(answer.token_ids) == TOKENS
            assert answer.end["finish_reason"] == "length"
            if request_id.endswith("-2"):
                assert answer.token_ids == await by_oracle(reader, request_id)
        finished = next(e for e in await reader.events("plain-0") if isinstance(e, RequestFinished))
    assert finished.usage.completion_tokens == TOKENS
    assert finished.usage.counts == {"forwards": 1 + 3 * (BLOCK + 1)}


async def test_a_stop_string_ends_the_answer_within_a_block(running: Running) -> None:
    async with clients.http(running) as client:
        whole = await ask(client, Answer("whole"))
        stop = whole.text[len(whole.text) // 2 :][:3]

        stopped = await ask(client, Answer("stopped"), "Tell me of whole.", stop=[stop])

    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.end["finish_reason"] == "stop"
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]


async def test_what_cannot_be_had_is_refused_by_name(running: Running) -> None:
    async with clients.http(running) as client:
        body = clients.body("Tell me of scores.", "refused", logprobs=2)
        answer = await client.post("/generate", json=body)

    assert answer.status_code == 400, answer.text
    assert "logprobs" in answer.text


async def test_an_answer_survives_its_worker_in_the_middle_of_a_block_and_replays(
    running: Running, environment: dict[str, str], config: str
) -> None:
    pid = running.pids.worker["0"]
    assert pid is not None
    answer = Answer("killed", awaited_tokens=2 * BLOCK)
    asked: dict[str, Any] = {"text": "Tell me of death.", "max_tokens": LONG, "way": "guided"}
    async with clients.http(running) as client:
        undisturbed = await ask(client, Answer("undisturbed"), **asked)
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(ask(client, answer, **asked))
            await answer.under_way.wait()
            os.kill(pid, signal.SIGKILL)
            assert not streamed.done()

    assert (answer.text, answer.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert answer.end["usage"]["completion_tokens"] == LONG
    async with clients.reader(running) as reader:
        chunks = await chunks_of(reader, "killed")
    assert len({chunk.attempt for chunk in chunks}) == 2, "the control: the second attempt wrote, too"
    assert all(len(chunk.token_ids) % BLOCK == 0 for chunk in chunks)
    assert answer.indices == list(range(len(answer.indices))), "one stream, nothing twice"
    decided = clients.run_on(running, "replay", "killed", env=environment)
    assert "decisions match" in decided.stdout, decided.stdout
    replayed = clients.run_on(running, "replay", "killed", "--execute", "--config", config, env=environment)
    assert replayed.returncode == 0, replayed.stdout
    assert "killed: " in replayed.stdout
