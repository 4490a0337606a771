"""A node on two ranks: the answer equals that of one rank, and the death of a follower is not noticed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shared.events import OutputFence
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint
from tests.tiny.four_heads import write_four_heads

pytestmark = pytest.mark.timeout(200)  # four processes start, and two of them twice
TEXT: Final = "Tell me a long story about two wizards."
PARAMS: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    file = Path(folder) / "two.yaml"
    group = {"node_names": ["prepare", "llm"], "ranks": [0, 1], "tp_size": 2}
    told = {
        "model": "decoder_lm",
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 256,
        "node_groups": [group],
        "model_kwargs": {"device": "cpu", "dtype": "float32", "max_step_tokens": 64},
    }
    file.write_text(yaml.safe_dump(told))
    with deploy.serve(folder, model=str(file)) as running:
        yield running


async def asked(running: Running, answer: Answer) -> Answer:
    async with clients.http(running) as http:
        return await clients.generate(http, answer, TEXT, **PARAMS)


async def test_two_ranks_answer_as_one_and_a_killed_follower_is_not_heard(
    shared: Running, random_deployment: Running
) -> None:
    alone = await asked(random_deployment, Answer("alone"))
    undisturbed = await asked(shared, Answer("undisturbed"))
    assert undisturbed.told == alone.told
    before = shared.pids.worker

    async with clients.http(shared) as http:
        disturbed = Answer("disturbed", awaited_tokens=10)
        telling = asyncio.create_task(clients.generate(http, disturbed, TEXT, **PARAMS))
        await disturbed.under_way.wait()
        os.kill(before["1"], signal.SIGKILL)
        answer = await telling

    assert answer.told == alone.told
    assert answer.indices == list(range(len(answer.indices)))  # no chunk twice, none missing
    async with clients.reader(shared) as reader:
        events = await reader.events("disturbed")
    assert any(isinstance(event, OutputFence) for event in events), "the kill came too late"
    await clients.wait_until_ready(shared)
    assert all(shared.pids.worker[rank] != pid for rank, pid in before.items()), "all members begin anew"
    assert "the whole group restarts" in shared.log() or "its whole group restarts" in shared.log()
    replayed = clients.run_on(shared, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout


async def test_four_ranks_hand_over_to_two_and_a_kill_is_not_heard(tmp_path: Path) -> None:
    """Prompts on four ranks, answers on two: equal to one rank, also when a follower of either is killed."""
    checkpoint = write_four_heads(tmp_path / "four")
    file = tmp_path / "split.yaml"
    told: dict[str, Any] = {
        "model": "decoder_lm",
        "checkpoint": str(checkpoint),
        "max_seq_len": 256,
        "model_kwargs": {"device": "cpu", "dtype": "float32", "max_step_tokens": 64},
    }
    groups = [
        {"node_names": ["prepare", "llm"], "ranks": [0, 1, 2, 3], "tp_size": 4},
        {"node_names": ["llm"], "ranks": [4, 5], "tp_size": 2, "graph_walks": ["decode"]},
    ]
    file.write_text(
        yaml.safe_dump(told | {"node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0]}]})
    )
    (tmp_path / "one").mkdir()
    with deploy.serve(tmp_path / "one", model=str(file)) as running:
        alone = await asked(running, Answer("alone"))
    file.write_text(yaml.safe_dump(told | {"node_groups": groups}))
    (tmp_path / "split").mkdir()

    with deploy.serve(tmp_path / "split", model=str(file)) as running:
        undisturbed = await asked(running, Answer("undisturbed"))
        async with clients.http(running) as http:
            disturbed = Answer("disturbed", awaited_tokens=10)
            telling = asyncio.create_task(clients.generate(http, disturbed, TEXT, **PARAMS))
            await disturbed.under_way.wait()
            for follower in ("3", "5"):
                pid = running.pids.worker[follower]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            answer = await telling
        replayed = clients.run_on(running, "replay", "--all")

    assert undisturbed.told == alone.told
    assert answer.told == alone.told
    assert answer.indices == list(range(len(answer.indices)))
    assert replayed.returncode == 0, replayed.stdout
