"""V-JEPA 2-AC over the real command line, by M*'s names: rollouts, streamed ones, scores and plans.

A rollout is compared with one that computes all frames again in each step, under the mask of the published
code; that equals recordings of it (`tests.models.vjepa2_ac`).
"""

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from models.vjepa2_ac.predictor import normalized
from shared.events import NodeReady, OutputChunk
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.vjepa2 import oracle as pixels
from tests.models.vjepa2_ac import cases, served
from tests.tiny.vjepa2_ac import tiny_vjepa2_ac

pytestmark = pytest.mark.timeout(200)

LONG: Final = 24
Floats = npt.NDArray[np.float32]


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).tolist()


def rollout(seed: int, horizon: int, *, streamed: bool = False) -> dict[str, Any]:
    return {
        "rollout_horizon": horizon,
        "stream_rollout": streamed,
        "actions": drawn(seed, horizon, 7),
        "states": drawn(seed + 100, horizon, 7),
    }


SCORED: Final = {
    "mpc": True,
    "actions": drawn(7, 3, 4, 7),
    "states": drawn(8, 3, 4, 7),
    "goal_hidden_fill": 0.2,
}
PLANNED: Final = {
    "cem": True, "states": [cases.POSE.tolist()], "samples": 12, "topk": 3, "cem_steps": 3,
    "rollout_horizon": 2,
}  # fmt: skip
REQUESTS: Final[dict[str, tuple[Sequence[str], dict[str, Any]]]] = {
    "rollout": (["clip"], rollout(1, 3)),
    "streamed": (["clip"], rollout(2, 5, streamed=True)),
    "other": (["other"], rollout(1, 3)),
    "clip": (["clip"], {"actions": drawn(5, 4, 7), "states": drawn(6, 4, 7)}),
    "encoded": (["clip"], {"skip_predictor": True}),
    "scored": (["clip"], SCORED),
    "planned": (["clip", "other"], PLANNED),
    "filled": (["clip"], {**PLANNED, "goal_hidden_fill": 0.5}),
}
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "rollout_horizon": {**rollout(1, 2), "rollout_horizon": 65},
    "actions": {**rollout(1, 4), "rollout_horizon": 5},
    "states": {**rollout(1, 4), "states": drawn(1, 3, 7)},
    "topk": {**PLANNED, "topk": 13, "goal_hidden_fill": 0.5},
    "goal_hidden": {**SCORED, "goal_hidden_fill": None},
    "files": PLANNED,
    "room": {**rollout(1, 64)},
}


@dataclass(slots=True)
class Found:
    """The results of the deployment.

    Attributes:
        lines: of each answer, without progress.
        refused: the errors, by the parameter they name.
        attempts: the numbers of the attempts of the killed rollout.
        before: how many of its frames were released when its worker was killed.
        verdicts, executed: of `dalsegno replay`.
    """

    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refused: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    before: int = 0
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: str = ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("rollouts")
    published = Path(__file__).parents[2] / "configs" / "vjepa2_ac.yaml"
    config = folder / "ac.yaml"
    config.write_text(
        published.read_text().replace("max_seq_len: 16384", "max_seq_len: 512")
        + f"checkpoint: {tiny_vjepa2_ac()}\n"
    )
    with deploy.serve(folder, model=str(config)) as running:
        result = asyncio.run(ask(running))
        result.verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "streamed", "--execute", "--config", str(config))
        result.executed = executed.stdout + executed.stderr
    return result


async def ask(running: Running) -> Found:
    found = Found()
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            for name, (files, options) in REQUESTS.items():
                tasks.create_task(keep(http, found, name, files, options))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep(http, found, "killed", ["clip"], rollout(3, LONG, streamed=True)))
            output = reader.subjects.outputs_of("killed")
            await reader.until(output, OutputChunk)
            pid = running.pids.worker["0"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        events = await reader.events("killed")
        found.attempts = {one.attempt for one in events if isinstance(one, NodeReady)}
        found.before = sum(isinstance(one, OutputChunk) and one.attempt == 1 for one in events)
        for name, options in REFUSED.items():
            answer = await post(http, f"refused-{name}", ["clip"], options)
            found.refused[name] = answer.status_code, answer.json()
    return found


async def keep(
    http: httpx.AsyncClient, found: Found, name: str, files: Sequence[str], options: dict[str, Any]
) -> None:
    answer = await post(http, name, files, options)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    found.lines[name] = [line for line in lines if not line["metadata"].get("advisory")]


async def post(
    http: httpx.AsyncClient, name: str, files: Sequence[str], options: dict[str, Any]
) -> httpx.Response:
    form = {"request_id": name, "model_kwargs": json.dumps(options)}
    return await http.post(
        "/generate", data=form, files=[("files", (one, io.BytesIO(pixels.FILES[one]))) for one in files]
    )


def tensors(lines: Sequence[dict[str, Any]], modality: str) -> list[Any]:
    """The tensors of one modality, as M*'s clients read them: raw numbers; the shape is in the metadata."""
    dtype = "<i8" if modality == "scalar" else "<f4"
    return [
        np.frombuffer(base64.b64decode(line["data"]), dtype).reshape(line["metadata"]["shape"])
        for line in lines
        if line["modality"] == modality
    ]


@cache
def network() -> Any:
    return served.load("predictor")._network


@torch.inference_mode()
def recomputed(file: str, options: dict[str, Any]) -> Floats:
    """The frames of a rollout, each by a forward over all frames before it: (horizon, patches, width)."""
    found = frame(file)
    controls = torch.tensor([[*a, *s] for a, s in zip(options["actions"], options["states"], strict=True)])
    for step in range(1, options["rollout_horizon"] + 1):
        behind = network()(found[None], controls[None, :step])[0, -1:]
        found = torch.cat([found, normalized(behind)])
    return found[1:].numpy()


@torch.inference_mode()
def frame(file: str) -> torch.Tensor:
    """The normalized latents of the first frame of a file, (1, patches, width)."""
    encoder = served.load("video_encoder")
    image = torch.from_numpy(pixels.pixels_of(file, None)[:1])
    found: torch.Tensor = encoder._frames(image[None])[0]
    return found


@pytest.mark.parametrize("name", ["rollout", "streamed", "other"])
def test_rollouts_of_concurrent_requests_are_those_of_a_recomputation(found: Found, name: str) -> None:
    [file], options = REQUESTS[name]
    frames = tensors(found.lines[name], "video")

    assert [one.shape for one in frames] == [(1, 16, 48)] * options["rollout_horizon"]
    assert served.is_close(np.concatenate(frames), recomputed(file, options))


def test_rollouts_depend_on_the_first_frame(found: Found) -> None:
    """Negative control."""
    first, other = (np.concatenate(tensors(found.lines[name], "video")) for name in ("rollout", "other"))

    assert not served.is_close(first, other)


def test_a_rollout_survives_its_worker(found: Found) -> None:
    frames = tensors(found.lines["killed"], "video")

    assert found.attempts == {1, 2}
    # All of them, if the machine was so busy that the kill came between the last frame and its result.
    assert 1 <= found.before <= LONG
    assert served.is_close(np.concatenate(frames), recomputed("clip", rollout(3, LONG)))


def test_a_clip_and_its_latents_have_ms_layout(found: Found) -> None:
    assert [one.shape for one in tensors(found.lines["clip"], "video")] == [(1, 64, 48)]
    assert [one.shape for one in tensors(found.lines["encoded"], "video")] == [(1, 64, 48)]


def test_scores_have_ms_layout(found: Found) -> None:
    lines = found.lines["scored"]
    [best], [costs], [latents] = (tensors(lines, name) for name in ("scalar", "tensor", "video"))

    assert latents.shape == (3, 64, 48)
    np.testing.assert_allclose(costs, np.abs(latents - 0.2).mean(axis=(1, 2)), rtol=1e-4)
    assert (best.dtype, int(best)) == (np.int64, int(costs.argmin()))


def test_plans_are_bounded_actions_that_depend_on_the_goal(found: Found) -> None:
    [planned], [filled] = (tensors(found.lines[name], "action") for name in ("planned", "filled"))

    assert planned.shape == filled.shape == (2, 7)
    assert np.abs(planned[:, :3]).max() <= 0.05
    assert (planned[:, 3:6] == 0).all()
    assert not np.array_equal(planned, filled)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(found: Found, name: str) -> None:
    status, body = found.refused[name]

    assert status == 400
    assert ("rollout_horizon" if name == "room" else name) in body["error"]["message"]


def test_every_request_replays(found: Found) -> None:
    assert {*REQUESTS, "killed"} <= found.verdicts.keys()
    assert all(one["matches"] for one in found.verdicts.values()), found.verdicts
    assert "agree" in found.executed, found.executed
