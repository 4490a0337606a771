"""A text encoder over the real command line, its encoder on a rank of its own: concurrent, killed, replayed.

The vectors are those of sentence-transformers' `encode` of the same folder.
"""

import asyncio
import os
import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from shared.events import NodeReady
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.text_encoder.harness import encoded, some_texts
from tests.tiny.encoders import sentence_folder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
TEXTS = some_texts(*(1 + 7 * number % 40 for number in range(24)))
PROMPTS = {"query": "the query : ", "document": ""}


async def embed(http: httpx.AsyncClient, given: Any, **body: Any) -> npt.NDArray[np.float32]:
    body["input"] = given
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return np.array([row["embedding"] for row in answer.json()["data"]], np.float32)


async def ask(running: Running, name: str) -> dict[str, Any]:
    """Concurrent and staggered requests, and one whose encoder is killed while it runs."""
    found: dict[str, Any] = {}
    async with clients.http(running) as http, clients.reader(running) as reader:

        async def keep(key: str, given: Any, **more: Any) -> None:
            found[key] = await embed(http, given, **more)

        async with asyncio.TaskGroup() as tasks:
            for number, text in enumerate(TEXTS):
                tasks.create_task(keep(f"alone {number}", text, model=name))
            tasks.create_task(keep("together", TEXTS, model=name))
            tasks.create_task(keep("query", TEXTS, model=name, prompt_name="query"))
        os.kill(running.pids.worker["1"], signal.SIGSTOP)  # the step cannot end before the kill
        form = {"request_id": "killed", "texts": TEXTS, "streaming": False}
        async with asyncio.TaskGroup() as tasks:
            killed = tasks.create_task(http.post("/generate", json=form))
            await reader.until(reader.subjects.ready(1, "killed"), NodeReady)
            os.kill(running.pids.worker["1"], signal.SIGKILL)
        found["killed"] = killed.result().json()
    return found


def test_texts_on_two_ranks_killed_and_replayed(tmp_path: Path) -> None:
    folder = sentence_folder("modernbert", prompts=PROMPTS, default_prompt="document")
    path = tmp_path / "encoder.yaml"
    path.write_text(
        f"model: text_encoder\ncheckpoint: {folder}\nmax_seq_len: 128\nnode_groups:\n"
        "  - node_names: [prepare]\n    ranks: [0]\n  - node_names: [encoder]\n    ranks: [1]\n"
    )
    with serve(tmp_path, model=str(path)) as running:
        name = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
        found = asyncio.run(ask(running, name))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "killed", "--execute", "--config", str(path))

    expected = encoded(folder, TEXTS)
    assert found["together"] == pytest.approx(expected, abs=1e-5)
    assert found["query"] == pytest.approx(encoded(folder, TEXTS, prompt_name="query"), abs=1e-5)
    for number in range(len(TEXTS)):
        assert found[f"alone {number}"][0] == pytest.approx(expected[number], abs=1e-5)
    [entry] = found["killed"]["outputs"]["embedding"]
    assert entry["metadata"]["shape"] == [*expected.shape]
    killed = np.frombuffer(b64decode(entry["data"]), "<f4").reshape(expected.shape)
    assert killed == pytest.approx(expected, abs=1e-5)
    assert all(verdict["matches"] for verdict in verdicts.values()), verdicts
    assert "edges agree" in executed.stdout, executed.stdout + executed.stderr
