"""BAGEL over the real command line, a branch of guidance on each of three ranks, as M* places it.

What was recorded of the published code is met pixel for pixel, whatever else is computed at the same time.
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
from models.bagel.drawing import CHECKPOINT_STEPS
from shared.events import OutputChunk
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.bagel.cases import CASES, SEED, Case, picture, published
from tests.tiny.bagel import bagel_checkpoint

pytestmark = pytest.mark.timeout(250)

DRAWN: Final = ("draw", "draw_plain", "draw_channel", "draw_think", "edit")
SIZE: Final = 256
"""The side of a picture whose steps last long enough for its worker to be killed in one of the last."""
TIMESTEPS: Final = {"draw_plain": 51, "draw": 61}
"""One more than the steps of a drawing that is killed."""
Pixels = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = yaml.safe_load((configs_folder() / "bagel_cfg_parallel.yaml").read_text())
    path = tmp_path_factory.mktemp("bagel") / "bagel_cfg_parallel.yaml"
    path.write_text(yaml.safe_dump(settings | {"checkpoint": str(bagel_checkpoint())}))
    return path


@pytest.fixture(scope="module")
def running(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deploy.serve(tmp_path_factory.mktemp("served"), model=str(config)) as running:
        yield running


def options_of(case: Case) -> dict[str, Any]:
    """The request parameters of a recorded case."""
    given = dict(case.options)
    height, width = given.pop("image_shapes", (None, None))
    told = {name: value for name, value in given.items() if name.startswith(("cfg_", "num_"))}
    if given.get("think"):
        # The published code counts the token that an answer begins with.
        told |= {"think_mode": True, "max_tokens": given["max_think_token_n"] - 1, "temperature": 0}
        told |= {"repetition_penalty": 1.0}
    return told | ({"width": width, "height": height} if width else {}) | {"seed": SEED}


async def draw(client: httpx.AsyncClient, request_id: str, case: Case, **more: Any) -> Pixels:
    """Ask as M*'s client does: the pixels of the image."""
    [text] = [one for one in case.inputs if one is not None]
    image = io.BytesIO()
    Image.fromarray(picture()).save(image, "PNG")
    with_image = None in case.inputs
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    *([{"type": "image_url", "image_url": {"url": _data_url(image)}}] if with_image else []),
                    {"type": "text", "text": text},
                ],
            }
        ],
        "output_modalities": ["image"],
        "streaming": False,
        "request_id": request_id,
        "model_kwargs": options_of(case) | more,
    }
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["outputs"]["image"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"]))))


def _data_url(image: io.BytesIO) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"


def difference(pixels: Pixels, wanted: Pixels, every: int = 1) -> int:
    """The largest difference of two images, of which `wanted` has every so many rows and columns."""
    return int(np.abs(pixels[::every, ::every].astype(int) - wanted).max())


async def test_sixteen_mixed_requests_at_once_are_each_the_recorded_or_single_one(running: Running) -> None:
    others = [
        CASES["draw" if n % 2 else "draw_plain"] for n in range(16 - 2 * len(DRAWN))
    ]  # other seeds, sizes and steps
    sizes = [{"seed": n, "width": 32 + 16 * (n % 3), "num_timesteps": 3 + n} for n in range(len(others))]
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        recorded = {
            (name, turn): tasks.create_task(draw(client, f"{name}-{turn}", CASES[name]))
            for name in DRAWN
            for turn in range(2)
        }
        mixed = [
            tasks.create_task(draw(client, f"mixed-{n}", case, **sizes[n])) for n, case in enumerate(others)
        ]
    for (name, _), task in recorded.items():
        assert difference(task.result(), published()[f"{name}.pixels"], CASES[name].every) <= 1, name
    async with clients.http(running) as client:
        for n, case in enumerate(others):
            alone = await draw(client, f"alone-{n}", case, **sizes[n])
            assert difference(mixed[n].result(), alone) <= 1
    assert len({task.result().tobytes() for task in mixed}) == len(others)


class Killed:
    """A drawing whose worker is killed while it runs."""

    def __init__(self, client: httpx.AsyncClient, request_id: str, case: str) -> None:
        self.request_id = request_id
        self.case = case
        options = {"num_timesteps": TIMESTEPS[case], "width": SIZE, "height": SIZE}
        self.pixels = asyncio.create_task(draw(client, request_id, CASES[case], **options))

    async def until_step(self, reader: clients.Reader, step: int) -> None:
        """Wait until the log shows that this step is done."""
        await reader.until(
            reader.subjects.outputs_of(self.request_id), OutputChunk, lambda one: step_of(one) >= step
        )

    async def resumed_near(self, reader: clients.Reader, step: int) -> Pixels:
        """The picture, if the second attempt went on near the step that the first one had reached.

        That is `step` or a later one.
        """
        pixels = await self.pixels
        chunks = [one for one in await reader.events(self.request_id) if isinstance(one, OutputChunk)]
        steps = {n: [step_of(one) for one in chunks if one.attempt == n and step_of(one)] for n in (1, 2)}
        reached, resumed = max(steps[1]), min(steps[2])
        assert reached >= step
        assert resumed >= reached - CHECKPOINT_STEPS, steps
        return pixels


def step_of(chunk: OutputChunk) -> int:
    """The step that a chunk of progress reports; 0 for another chunk."""
    return int(chunk.metadata.get("progress", {}).get("step", 0))


def kill(running: Running, rank: int) -> None:
    pid = running.pids.worker[str(rank)]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_drawing_resumes_near_its_last_step_on_any_rank_and_replays(
    running: Running, config: Path
) -> None:
    async with clients.http(running) as client, clients.reader(running) as reader:
        whole = {case: await Killed(client, case, case).pixels for case in TIMESTEPS}
        for rank in range(3):
            drawings = {f"killed-{rank}": Killed(client, f"killed-{rank}", "draw")}
            reached = {f"killed-{rank}": 45}
            if rank == 0:  # a drawing without guidance is one run, all of which is there
                await drawings["killed-0"].until_step(reader, 5)
                drawings["plain"] = Killed(client, "plain", "draw_plain")
                reached = {"plain": 45, "killed-0": 5}
            for name, step in reached.items():
                await drawings[name].until_step(reader, step)
            kill(running, rank)
            for name, drawing in drawings.items():
                pixels = await drawing.resumed_near(reader, reached[name])
                assert difference(pixels, whole[drawing.case]) <= 1
            await clients.wait_until_ready(running)
    replayed = clients.run_on(running, "replay", "killed-1", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
    assert all(one["matches"] for one in verdicts.values()), verdicts
