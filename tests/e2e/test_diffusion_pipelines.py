"""A tiny Z-Image over the real command line, a node on each of three ranks, against diffusers' own call.

Mixed sizes and steps at the same time; the denoiser's worker killed near the last step; and replayed.
"""

import asyncio
import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import yaml
from PIL import Image

from configs.files import configs_folder
from models.diffusion_pipelines.run_checkpoint import CHECKPOINT_STEPS
from shared.events import OutputChunk
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.diffusion_pipelines.served import Ask, by_diffusers, difference
from tests.tiny.diffusion import tiny_pipeline

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

Pixels = npt.NDArray[np.uint8]
NAME: Final = "z_image"
DENOISER_RANK: Final = 1
STEPS: Final = 50
MIXED: Final = tuple(
    Ask(
        prompt,
        seed,
        {"width": 32 + 16 * (seed % 3), "height": 32, "num_inference_steps": 3 + seed % 2},
    )
    for seed, prompt in enumerate(("a red cat", "entirely other words", "a mat", "a cat on a red mat") * 2)
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = yaml.safe_load((configs_folder() / "z_image_three_ranks.yaml").read_text())
    path = tmp_path_factory.mktemp("pipelines") / "z_image_three_ranks.yaml"
    path.write_text(yaml.safe_dump(settings | {"checkpoint": str(tiny_pipeline(NAME))}))
    return path


@pytest.fixture(scope="module")
def running(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("served"), model=str(config)) as running:
        yield running


async def draw(client: httpx.AsyncClient, request_id: str, ask: Ask) -> Pixels:
    """The pixels of an image."""
    options = {"guidance_scale": 3.0, "negative_prompt": "", "seed": ask.seed, **(ask.call or {})}
    body: dict[str, Any] = {
        "text": ask.prompt,
        "output_modalities": ["image"],
        "streaming": False,
        "request_id": request_id,
        "model_kwargs": options,
    }
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["outputs"]["image"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"]))))


def step_of(chunk: OutputChunk) -> int:
    """The step that a chunk of progress reports; 0 for another chunk."""
    return int(chunk.metadata.get("progress", {}).get("step", 0))


async def test_images_of_mixed_sizes_and_steps_at_once_are_those_of_the_bare_pipeline(
    running: Running,
) -> None:
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        drawn = [tasks.create_task(draw(client, f"mixed-{ask.seed}", ask)) for ask in MIXED]
    images = [task.result() for task in drawn]
    for ask, image in zip(MIXED, images, strict=True):
        assert difference(image[None], by_diffusers(NAME, ask)) <= 1, ask
    assert len({image.tobytes() for image in images}) == len(images)


async def test_an_image_resumes_near_its_last_step_and_replays(running: Running, config: Path) -> None:
    ask = Ask("a red cat", 1, {"width": 96, "height": 96, "num_inference_steps": STEPS})
    async with clients.http(running) as client, clients.reader(running) as reader:
        drawing = asyncio.create_task(draw(client, "killed", ask))
        outputs = reader.subjects.outputs_of("killed")
        await reader.until(outputs, OutputChunk, lambda one: step_of(one) >= STEPS - CHECKPOINT_STEPS)
        pid = running.pids.worker[str(DENOISER_RANK)]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        image = await drawing
        chunks = [one for one in await reader.events("killed") if isinstance(one, OutputChunk)]
        await clients.wait_until_ready(running)
    steps = {n: [step_of(one) for one in chunks if one.attempt == n and step_of(one)] for n in (1, 2)}
    assert min(steps[2]) >= max(steps[1]) - 2 * CHECKPOINT_STEPS > 0, steps
    assert difference(image[None], by_diffusers(NAME, ask)) <= 1
    replayed = clients.run_on(running, "replay", "killed", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
    assert all(one["matches"] for one in verdicts.values()), verdicts
