"""Models that keep more than keys and values, over two ranks: it moves between them, and survives them.

Qwen3-Next has recurrent states, and DeepSeek V3.2 the keys of its indexers.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from shared.events import NodeReady
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.oracle import generate

TOKENS: Final = 96
CONFIG: Final = """\
model: decoder_lm
checkpoint: {checkpoint}
max_seq_len: 512
model_kwargs: {{dtype: float32}}
node_groups:
  - {{node_names: [prepare, llm], ranks: [0]}}
  - {{node_names: [llm], ranks: [1], graph_walks: [decode]}}
"""


@pytest.fixture(scope="module", params=["qwen3_next", "deepseek_v32"])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def config(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / f"{family}.yaml"
    file.write_text(CONFIG.format(checkpoint=tiny_checkpoint(family)))
    return file


@pytest.fixture(scope="module")
def running(family: Family, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp(family), model=str(config)) as running:
        yield running


@pytest.mark.slow
async def test_answers_are_those_of_generate_though_each_rank_is_killed(
    running: Running, config: Path, family: Family
) -> None:
    texts = [f"Tell me of the number {number}." for number in range(4)]
    for killed in ("0", "1"):
        waiting = [Answer(f"{killed}-{number}", awaited_tokens=20) for number in range(len(texts))]
        async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
            for answer, text in zip(waiting, texts, strict=True):
                tasks.create_task(
                    clients.generate(client, answer, text, max_tokens=TOKENS, ignore_eos=True, temperature=0)
                )
            await waiting[0].under_way.wait()
            assert len(waiting[0].token_ids) < TOKENS
            pid = running.pids.worker[killed]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        async with clients.reader(running) as reader:
            events = await reader.events(f"{killed}-0")
        call = next(e for e in events if isinstance(e, NodeReady) and e.walks[0].name == "prefill").walks[0]
        prompt = list(read_ids(call.inputs["token_ids"]))
        assert waiting[0].token_ids == generate(family, prompt, TOKENS)
        assert len({tuple(answer.token_ids) for answer in waiting}) == len(texts)

    replayed = clients.run_on(running, "replay", "1-1", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout
