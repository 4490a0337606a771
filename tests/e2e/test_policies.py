"""Robot actions over the real command line: Pi0.5 as M* places it.

Every chunk of actions is that of the plain restatement, whatever else is computed at the same time.
"""

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from models.robot_policy.flow import first_noise
from models.robot_policy.normalization import Normalization
from shared.events import NodeReady
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.gateway.policy.openpi_client import PolicyClient
from tests.models.pi05 import restatement
from tests.models.robot_policy.observations import DROID, STATE, npz, png, png_bytes, prepared
from tests.tiny import pi

pytestmark = pytest.mark.timeout(200)

REQUESTS: Final = 8
LONG: Final = 100
"""Steps of a flow that lasts long enough to be killed in its middle."""
Actions = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "pi05.yaml"
    path.write_text(
        f"model: pi05\ncheckpoint: {pi.tiny_pi05()}\nmax_seq_len: 2048\n"
        "node_groups:\n  - node_names: [vit_encoder]\n    ranks: [0]\n"
        "  - node_names: [LLM]\n    ranks: [0]\n"
    )
    return path


@pytest.fixture(scope="module")
def running(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("served"), model=str(config)) as running:
        yield running


async def act(client: httpx.AsyncClient, request_id: str, cameras: int, text: str, **options: Any) -> Actions:
    """Ask as M*'s client does: a form with images and the state."""
    answer = await client.post(
        "/generate",
        files=[("files", (f"{n}.png", png_bytes(n), "image/png")) for n in range(cameras)],
        data={
            "text": text,
            "input_modalities": "image,text",
            "output_modalities": "action",
            "streaming": "false",
            "request_id": request_id,
            "model_kwargs": json.dumps({"robot_state": STATE, **options}),
        },
    )
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["outputs"]["action"]
    assert found["metadata"]["dtype"] == "float32"
    shape = found["metadata"]["shape"]
    return np.frombuffer(base64.b64decode(found["data"]), np.float32).reshape(shape)


@cache
def tensors() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(pi.tiny_pi05() / "model.safetensors")
    return found


async def expected(running: Running, request_id: str, files: Any, text: str, **options: Any) -> Actions:
    """The restatement's actions, with the noise of the request's seed in the log."""
    async with clients.reader(running) as reader:
        [*orders] = [one for one in await reader.events(request_id) if isinstance(one, NodeReady)]
    ready = prepared("pi05", files, text, **({} if len(files) == 1 else {"robot_state": STATE}))
    noise = first_noise(orders[0].seed, pi.HORIZON, pi.ACTION_DIM)
    ids = np.frombuffer(ready.outputs["token_ids"].data, np.int32).tolist()
    pixels = torch.from_numpy(ready.outputs["pixels"])
    actions = restatement.sample_actions(
        tensors(), pixels, ids, noise, options.get("num_flow_steps", pi.STEPS)
    )
    return Normalization.read(pi.tiny_pi05(), quantiles=True).restored(actions.numpy())[:, : pi.ROBOT_DIM]


async def test_actions_of_many_robots_at_once_are_each_those_of_the_restatement(running: Running) -> None:
    observation = {**DROID, "prompt": "open the drawer"}

    def robot() -> list[dict[str, Any]]:
        with PolicyClient(running.url) as client:
            return [client.infer(observation) for _ in range(3)]

    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        by_socket = tasks.create_task(asyncio.to_thread(robot))
        by_form = [
            tasks.create_task(act(client, f"r{n}", 2 + n % 2, f"take cup {n}", num_flow_steps=2 + n % 3))
            for n in range(REQUESTS)
        ]

    for n, task in enumerate(by_form):
        files = [png(camera) for camera in range(2 + n % 2)]
        wanted = await expected(running, f"r{n}", files, f"take cup {n}", num_flow_steps=2 + n % 3)
        np.testing.assert_allclose(task.result(), wanted, rtol=0, atol=2e-3)
        assert wanted.std() > 0.1
    asked = {str(task.result().tobytes()) for task in by_form}
    assert len(asked) == REQUESTS
    for answer in by_socket.result():
        wanted = await expected(running, answer["request_id"], [npz(**DROID)], "open the drawer")
        np.testing.assert_allclose(answer["actions"], wanted, rtol=0, atol=2e-3)


async def test_actions_survive_their_worker_and_replay(running: Running, config: Path) -> None:
    pid = running.pids.worker["0"]
    assert pid is not None
    async with clients.http(running) as client, clients.reader(running) as reader:
        asking = asyncio.create_task(act(client, "killed", 2, "fold", num_flow_steps=LONG))
        await reader.until(reader.subjects.ready(0, "killed"), NodeReady)
        os.kill(pid, signal.SIGKILL)
        assert not asking.done()
        found = await asking
    wanted = await expected(running, "killed", [png(0), png(1)], "fold", num_flow_steps=LONG)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-3)
    replayed = clients.run_on(running, "replay", "killed", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
    assert len(verdicts) == REQUESTS + 4
    assert all(one["matches"] for one in verdicts.values()), verdicts
