"""ColBERT over the real command line: multi-vectors and MaxSim scores, concurrent, killed once, replayed.

The oracle is sentence-transformers' multi-vector encoder of the same folder.
"""

import asyncio
import os
import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dalsegno import Client
from shared.events import NodeReady
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.late_interaction.harness import DOCUMENTS, QUERIES, oracle
from tests.tiny.colbert import SIZE, stanford_folder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


async def ask(running: Running) -> dict[str, Any]:
    """Concurrent requests of all routes, and one whose worker is killed while it runs."""
    found: dict[str, Any] = {}
    async with clients.http(running) as http, clients.reader(running) as reader:

        async def post(key: str, path: str, **body: Any) -> None:
            answer = await http.post(path, json=body)
            found[key] = answer.json()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(post("documents", "/v1/embeddings", model="stanford", input=DOCUMENTS))
            tasks.create_task(
                post("queries", "/v1/embeddings", model="stanford", input=QUERIES, task="query")
            )
            tasks.create_task(post("rerank", "/v1/rerank", query=QUERIES[0], documents=DOCUMENTS))
            tasks.create_task(post("score", "/v1/score", text_1=QUERIES, text_2=DOCUMENTS[:3]))
            tasks.create_task(
                post("image", "/v1/score", text_1="a", text_2=[{"image": "data:image/png;base64,AA=="}])
            )
        os.kill(running.pids.worker["0"], signal.SIGSTOP)  # the step cannot end before the kill
        form = {"request_id": "killed", "texts": DOCUMENTS, "streaming": False}
        async with asyncio.TaskGroup() as tasks:
            killed = tasks.create_task(http.post("/generate", json=form))
            await reader.until(reader.subjects.ready(0, "killed"), NodeReady)
            os.kill(running.pids.worker["0"], signal.SIGKILL)
        found["killed"] = killed.result().json()
    return found


def test_vectors_and_scores_are_those_of_the_oracle_also_after_a_kill(tmp_path: Path) -> None:
    folder = stanford_folder()
    with serve(tmp_path, model=str(folder)) as running:
        found = asyncio.run(ask(running))
        with Client(running.url) as client:
            ranked = client.rerank(QUERIES[0], DOCUMENTS, top_n=2)
            answer = client.generate(texts=DOCUMENTS, output_modalities=("embedding",))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "killed", "--execute", "--config", str(folder))

    queries, documents = oracle(folder).encode_query(QUERIES), oracle(folder).encode_document(DOCUMENTS)
    scores = oracle(folder).similarity(queries, documents).numpy()
    for name, expected in (("queries", queries), ("documents", documents)):
        for row, vectors in zip(found[name]["data"], expected, strict=True):
            assert np.array(row["embedding"]) == pytest.approx(vectors, abs=1e-5)
    assert [one["score"] for one in found["score"]["data"]] == pytest.approx(np.diagonal(scores), abs=1e-4)
    best = np.argsort(-scores[0]).tolist()
    assert [one["index"] for one in found["rerank"]["results"]] == best
    assert [one.index for one in ranked] == best[:2]
    assert found["image"]["error"]["code"] == "unsupported_modality"
    assert answer.multi_vectors is not None
    assert np.concatenate(answer.multi_vectors) == pytest.approx(np.concatenate(documents), abs=1e-5)
    assert [len(one) for one in answer.multi_vectors] == [len(one) for one in documents]
    assert_killed(found["killed"]["outputs"], documents)
    assert all(verdict["matches"] for verdict in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr, executed.stdout + executed.stderr


def assert_killed(outputs: dict[str, Any], documents: list[Any]) -> None:
    """The two outputs of a request on the log are the oracle's vectors and their numbers."""
    [vectors], [counts] = outputs["embedding"], outputs["vectors"]
    rows = np.frombuffer(b64decode(vectors["data"]), "<f4").reshape(-1, SIZE)
    assert rows == pytest.approx(np.concatenate(documents), abs=1e-5)
    assert np.frombuffer(b64decode(counts["data"]), "<i4").tolist() == [len(one) for one in documents]


def test_a_folder_passes_the_check() -> None:
    ended = clients.run("check", str(stanford_folder()))

    assert ended.returncode == 0, ended.stdout + ended.stderr
