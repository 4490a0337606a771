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
from shared.events import NodeReady
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.bagel.cases import CASES, SEED, Case, picture, published
from tests.tiny.bagel import bagel_checkpoint

pytestmark = pytest.mark.timeout(250)

DRAWN: Final = ("draw", "draw_plain", "draw_channel", "draw_think", "edit")
LONG: Final = 80
"""Steps of a flow that lasts long enough to be killed in its middle."""
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


async def test_a_drawing_survives_each_of_its_ranks_and_replays(running: Running, config: Path) -> None:
    async with clients.http(running) as client, clients.reader(running) as reader:
        whole = await draw(client, "whole", CASES["draw"], num_timesteps=LONG)
        for rank in range(3):
            name = f"killed-{rank}"
            asking = asyncio.create_task(draw(client, name, CASES["draw"], num_timesteps=LONG))
            await reader.until(reader.subjects.ready(rank, name), NodeReady)
            pid = running.pids.worker[str(rank)]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert not asking.done()
            assert difference(await asking, whole) <= 1
            await clients.wait_until_ready(running)
    replayed = clients.run_on(running, "replay", "killed-1", "--execute", "--config", str(config))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
    assert all(one["matches"] for one in verdicts.values()), verdicts
