"""LLaDA2, and Dream with a verifier (APD), served by real processes: as naive runs say, and resumed."""

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import pytest
import yaml

from models.block_diffusion.nodes import load as load_blocks
from models.diffusion_text.node import DiffusionLM
from models.masked_diffusion.nodes import load as load_masked
from models.programs import TokenRequest
from models.sequence_request import SamplingParams
from shared.events import NodeReady, OutputChunk
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer, Reader
from tests.e2e.deploy import Running
from tests.models.block_diffusion.naive import NaiveRun, answer
from tests.tiny.block_diffusion import tiny_llada2, tiny_verifier
from tests.tiny.masked_diffusion import tiny_dream

BLOCK: Final = 8
TOKENS: Final = 20
LONG: Final = 120
ASKED: Final[dict[str, Any]] = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def llada2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("llada2"), model=str(tiny_llada2())) as running:
        yield running


async def by_naive_run(reader: Reader, request_id: str, node: DiffusionLM) -> list[int]:
    """The tokens of an answer, from the request's order in the log."""
    events = await reader.events(request_id)
    call = next(e for e in events if isinstance(e, NodeReady) and e.walks[0].name == "prefill").walks[0]
    request = TokenRequest(
        prompt_ids=list(read_ids(call.inputs["token_ids"])),
        prefix_ids=[],
        max_tokens=call.args["max_tokens"],
        end_ids=frozenset(),
        sampling=SamplingParams(),
        options=call.args["options"],
        seed=0,
        choice=0,
    )
    driver = node.token_programs[call.args["token_program"]](node, request)
    models = {"": node.model} | {name: tower.model for name, tower in node.towers.items()}
    return answer(NaiveRun(models).run(driver))


async def ask(client: httpx.AsyncClient, found: Answer, **params: Any) -> Answer:
    return await clients.generate(client, found, f"Tell me of {found.request_id}.", **(ASKED | params))


async def test_answers_at_once_are_those_of_naive_runs(llada2: Running) -> None:
    ways: Mapping[str, dict[str, Any]] = {
        "plain": {"block_size": BLOCK},
        "parallel": {"block_length": BLOCK, "threshold": 0.2},
        "edited": {"block_length": BLOCK, "threshold": 0.2, "edit_threshold": 0.15, "max_post_steps": 4},
        "guided": {"cfg_scale": 1.0, "steps": 4},
    }
    async with clients.http(llada2) as client, asyncio.TaskGroup() as tasks:
        asked = {name: tasks.create_task(ask(client, Answer(name), **way)) for name, way in ways.items()}

    node = load_blocks(tiny_llada2(), dtype="float32")
    async with clients.reader(llada2) as reader:
        for name, task in asked.items():
            assert task.result().token_ids == await by_naive_run(reader, name, node)
            assert len(task.result().token_ids) == TOKENS
        chunks = [one for one in await reader.events("plain") if isinstance(one, OutputChunk)]
    assert len(chunks) > 1, "it streams by blocks"
    assert asked["parallel"].result().token_ids != asked["edited"].result().token_ids


async def test_an_answer_survives_its_worker_in_the_middle_of_a_block_and_replays(llada2: Running) -> None:
    pid = llada2.pids.worker["0"]
    assert pid is not None
    options = {"max_tokens": LONG, "block_length": BLOCK, "temperature": 0.7, "seed": 11}
    async with clients.http(llada2) as client:
        killed = Answer("killed", awaited_tokens=2 * BLOCK)
        async with asyncio.TaskGroup() as tasks:
            streamed = tasks.create_task(ask(client, killed, **options))
            await killed.under_way.wait()
            os.kill(pid, signal.SIGKILL)
            assert not streamed.done()
        again = await clients.generate(client, Answer("again"), "Tell me of killed.", **(ASKED | options))

    assert (killed.token_ids, killed.text) == (again.token_ids, again.text), "draws depend on the place alone"
    assert len(killed.token_ids) == LONG
    async with clients.reader(llada2) as reader:
        chunks = [one for one in await reader.events("killed") if isinstance(one, OutputChunk)]
    assert len({one.attempt for one in chunks}) == 2, "the control: the second attempt wrote, too"
    assert killed.indices == list(range(len(killed.indices))), "one stream, nothing twice"
    replayed = clients.run_on(llada2, "replay", "killed", "--execute", "--config", str(tiny_llada2()))
    assert replayed.returncode == 0, replayed.stdout


async def test_a_verifier_accepts_drafts_of_a_served_denoiser(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = tmp_path_factory.mktemp("config") / "dream.yaml"
    (config.parent / "verifier").symlink_to(tiny_verifier())
    settings = {
        "model": "masked_diffusion",
        "checkpoint": str(tiny_dream()),
        "max_seq_len": 512,
        "model_kwargs": {"verifier": "verifier", "dtype": "float32"},
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}],
    }
    config.write_text(yaml.safe_dump(settings))
    with deploy.serve(tmp_path_factory.mktemp("apd"), model=str(config)) as running:
        async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
            options = {"enable_apd": True, "max_lookahead": 6, "verifier_weight": 0.05}
            asked = {
                name: tasks.create_task(ask(client, Answer(name), **(options | {"kv_window": window})))
                for name, window in (("first", 400), ("second", 3), ("third", 500))
            }
        node = load_masked(tiny_dream(), dtype="float32", kwargs={"verifier": str(tiny_verifier())})
        async with clients.reader(running) as reader:
            for name, task in asked.items():
                assert task.result().token_ids == await by_naive_run(reader, name, node)
    usage = asked["first"].result().end["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["counts"]["drafts"] > TOKENS, "and it drafted more than it accepted"
