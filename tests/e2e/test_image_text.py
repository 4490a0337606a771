"""CLIP over the real command line, its towers on a rank of their own: texts and images, killed, replayed.

The embeddings are those of transformers' `get_text_features` and `get_image_features`.
"""

import asyncio
import os
import signal
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shared.events import NodeReady
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.image_text.harness import IMAGES, TEXTS, image_features, text_features
from tests.tiny.image_text import tiny_image_text

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
WORDS = [text for text in TEXTS if text]
URLS = [f"data:image/png;base64,{b64encode(data).decode()}" for data in IMAGES]
PICTURES = [{"image": url} for url in URLS]


def unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    scaled: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


def configuration(folder: Path) -> str:
    """A file with the towers on a rank of their own."""
    path = folder / "clip.yaml"
    path.write_text(
        f"model: image_text\ncheckpoint: {tiny_image_text('clip')}\nmax_seq_len: 77\nnode_groups:\n"
        "  - node_names: [prepare]\n    ranks: [0]\n  - node_names: [encoder]\n    ranks: [1]\n"
    )
    return str(path)


async def ask(running: Running) -> dict[str, Any]:
    """Concurrent requests of all routes, and one whose towers are killed while it runs."""
    found: dict[str, Any] = {}
    async with clients.http(running) as http, clients.reader(running) as reader:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def post(key: str, path: str, **body: Any) -> None:
            found[key] = (await http.post(path, json=body)).json()

        async with asyncio.TaskGroup() as tasks:
            mixed = [WORDS[0], PICTURES[0], *WORDS[1:], *PICTURES[1:]]
            tasks.create_task(post("mixed", "/v1/embeddings", model=model, input=mixed))
            tasks.create_task(post("unit", "/v1/embeddings", model=model, input=mixed, normalize=True))
            for number, picture in enumerate(PICTURES):
                tasks.create_task(post(f"alone {number}", "/v1/embeddings", model=model, input=[picture]))
            tasks.create_task(post("score", "/v1/score", text_1=PICTURES[0], text_2=WORDS))
            tasks.create_task(post("rerank", "/v1/rerank", query=WORDS[0], documents=PICTURES))
        os.kill(running.pids.worker["1"], signal.SIGSTOP)  # the step cannot end before the kill
        form = {"request_id": "killed", "texts": WORDS, "streaming": False}
        async with asyncio.TaskGroup() as tasks:
            killed = tasks.create_task(http.post("/generate", json=form))
            await reader.until(reader.subjects.ready(1, "killed"), NodeReady)
            os.kill(running.pids.worker["1"], signal.SIGKILL)
        found["killed"] = killed.result().json()
    return found


def rows_of(answer: dict[str, Any]) -> npt.NDArray[np.float32]:
    return np.array([row["embedding"] for row in answer["data"]], np.float32)


def test_texts_and_images_on_two_ranks_killed_and_replayed(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    with serve(tmp_path, model=config) as running:
        found = asyncio.run(ask(running))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "killed", "--execute", "--config", config)

    texts, images = text_features("clip", WORDS), image_features("clip", IMAGES)
    mixed = np.concatenate([texts[:1], images[:1], texts[1:], images[1:]])
    assert rows_of(found["mixed"]) == pytest.approx(mixed, abs=1e-5)
    assert rows_of(found["unit"]) == pytest.approx(unit(mixed), abs=1e-5)
    for number in range(len(IMAGES)):
        assert rows_of(found[f"alone {number}"])[0] == pytest.approx(images[number], abs=1e-5)
    scores = unit(texts) @ unit(images).T
    assert [one["score"] for one in found["score"]["data"]] == pytest.approx(scores[:, 0], abs=1e-5)
    assert [one["index"] for one in found["rerank"]["results"]] == np.argsort(-scores[0]).tolist()
    [entry] = found["killed"]["outputs"]["embedding"]
    killed = np.frombuffer(b64decode(entry["data"]), "<f4").reshape(texts.shape)
    assert killed == pytest.approx(texts, abs=1e-5)
    assert all(verdict["matches"] for verdict in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr, executed.stdout + executed.stderr


def test_folders_pass_the_check() -> None:
    ended = clients.run("check", str(tiny_image_text("siglip")))

    assert ended.returncode == 0, ended.stdout + ended.stderr
