"""The demo that draws, as its page tells a newcomer to use it; it draws the pictures of that page."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
from PIL import Image

from configs import demo_draw
from configs.demo_draw.evaluate import pixels_of, right
from configs.demo_draw.scenes import Scene
from tests.e2e.deploy import Running, serve

PAGE: Final = Path(demo_draw.__file__).parent
PICTURES: Final = {
    "red-circle.png": ("a red circle", Scene("red", "circle", "white")),
    "blue-star.png": (
        "a large blue star on a yellow background", Scene("blue", "star", "yellow", "large"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("demo-draw"), model="demo-draw") as found:
        yield found


@pytest.mark.parametrize("name", PICTURES)
def test_it_draws_the_pictures_of_its_page(running: Running, tmp_path: Path, name: str) -> None:
    prompt, scene = PICTURES[name]
    command = [sys.executable, "-m", "dalsegno", "ask", prompt, "--seed", "1", "--url", running.url]
    subprocess.run([*command, "--out", str(tmp_path / name)], check=True, capture_output=True)

    with Image.open(tmp_path / name) as drawn, Image.open(PAGE / name) as shown:
        assert np.abs(pixels_of(drawn) - pixels_of(shown)).max() <= 2, "by rounding"
        assert right(pixels_of(drawn), scene) == {"colour": True, "shape": True, "background": True}


def test_sizes_that_it_cannot_draw_are_refused(running: Running) -> None:
    answer = httpx.post(
        f"{running.url}/v1/images/generations", json={"prompt": "a red circle", "size": "128x64"}
    )

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "size (width): expected a multiple of 8 from 8 to 64, found 128" in message


def test_words_that_it_does_not_know_do_no_harm(running: Running) -> None:
    body = {"prompt": "ein 🐈 on the moon", "num_inference_steps": 2, "output_format": "webp", "seed": 1}
    answer = httpx.post(f"{running.url}/generate", json={"text": body.pop("prompt"), "model_kwargs": body})

    assert answer.status_code == 200, answer.text
    assert io.StringIO(answer.text).readline()
