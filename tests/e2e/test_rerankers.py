"""A cross-encoder over the real command line on two ranks: concurrent, killed, replayed."""

import asyncio
import os
import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared.events import NodeReady
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.reranker.harness import QUERY, Scores, predicted, some_texts
from tests.tiny.rerankers import tiny_cross_encoder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
TEXTS = some_texts(*(1 + 7 * number % 70 for number in range(20)))


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ask(running: Running) -> dict[str, Any]:
    """Requests of all routes at once, and one whose scorer is killed while it runs."""
    found: dict[str, Any] = {}
    async with clients.http(running) as http, clients.reader(running) as reader:

        async def keep(key: str, path: str, **body: Any) -> None:
            found[key] = await post(http, path, **body)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep("ranked", "/v1/rerank", query=QUERY, documents=TEXTS))
            tasks.create_task(keep("best", "/v2/rerank", query=QUERY, documents=TEXTS, top_n=3, model="bert"))
            tasks.create_task(keep("pairs", "/v1/score", text_1=TEXTS, text_2=TEXTS[::-1]))
            for number, text in enumerate(TEXTS):
                tasks.create_task(keep(f"alone {number}", "/v1/score", text_1=QUERY, text_2=text))
        os.kill(running.pids.worker["1"], signal.SIGSTOP)  # the step cannot end before the kill
        form = {"request_id": "killed", "texts": TEXTS, "queries": [QUERY], "streaming": False}
        async with asyncio.TaskGroup() as tasks:
            killed = tasks.create_task(http.post("/generate", json=form))
            await reader.until(reader.subjects.ready(1, "killed"), NodeReady)
            os.kill(running.pids.worker["1"], signal.SIGKILL)
        found["killed"] = killed.result().json()
        refused = await http.post("/v1/rerank", json={"query": "a", "documents": ["b"], "instruction": "c"})
        found["refused"] = refused.json()["error"]
    return found


def scores_of(answer: dict[str, Any]) -> list[float]:
    return [one["score"] for one in answer["data"]]


def test_texts_are_ranked_on_two_ranks_killed_and_replayed(tmp_path: Path) -> None:
    folder = tiny_cross_encoder("bert")
    path = tmp_path / "bert.yaml"
    path.write_text(
        f"model: reranker\ncheckpoint: {folder}\nmax_seq_len: 64\nnode_groups:\n"
        "  - node_names: [prepare]\n    ranks: [0]\n  - node_names: [scorer]\n    ranks: [1]\n"
    )
    with serve(tmp_path, model=str(path)) as running:
        found = asyncio.run(ask(running))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "killed", "--execute", "--config", str(path))

    expected = predicted(folder, QUERY, TEXTS)
    order = np.argsort(-expected, kind="stable").tolist()
    ranked = found["ranked"]["results"]
    assert [one["index"] for one in ranked] == order
    assert [one["relevance_score"] for one in ranked] == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert [one["index"] for one in found["best"]["results"]] == order[:3]
    pairs = [predicted(folder, one, [other])[0] for one, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert scores_of(found["pairs"]) == pytest.approx(pairs, abs=1e-5)
    for number, one in enumerate(expected):
        assert scores_of(found[f"alone {number}"]) == pytest.approx([one], abs=1e-5)
    assert killed_scores(found["killed"]) == pytest.approx(expected, abs=1e-5)
    assert found["refused"]["code"] == "not_supported"
    assert found["refused"]["message"].startswith("instruction: expected none")
    assert all(verdict["matches"] for verdict in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr, executed.stdout + executed.stderr


def killed_scores(answer: dict[str, Any]) -> Scores:
    [entry] = answer["outputs"]["score"]
    return np.frombuffer(b64decode(entry["data"]), "<f4")
