"""`dalsegno ask --out`: one image, sound or video in a file, from a gateway with a scripted model."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from dalsegno.ask.command import ask
from models.media.encoders import encode_image
from shared.events import Event, RequestSubmitted
from tests.gateway.images.test_routes import PAINTER, PIXELS, draw
from tests.gateway.world import deployment, listening


async def asked(*arguments: object) -> tuple[Any, list[Event]]:
    """Run the command against a gateway; return its result, and the requests on the log."""
    async with deployment(draw, served=PAINTER) as world, listening(world) as url:
        command = [*map(str, arguments), "--url", url]
        result = await asyncio.to_thread(CliRunner().invoke, ask, command)
        return result, world.events("request")


@pytest.mark.processes
async def test_an_image_is_saved_in_the_format_of_its_name_and_progress_is_shown(tmp_path: Path) -> None:
    source, out = tmp_path / "in.png", tmp_path / "red.webp"
    source.write_bytes(encode_image(PIXELS).tobytes())
    result, [event] = await asked(
        "a red circle", "--image", source, "--out", out, "--size", "64x48", "--seed", 3
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"a circle is round\n{out}\n"
    assert "step 1 of 2" in result.stderr
    with Image.open(out) as image:
        assert (image.format, image.size) == ("WEBP", (56, 40))
    assert isinstance(event, RequestSubmitted)
    assert event.params.options == {"output_format": "webp", "width": 64, "height": 48}
    assert event.inputs.output_modalities == ["image"]
    assert [file.modality for file in event.inputs.files] == ["image"]
    assert event.params.seed == 3


@pytest.mark.processes
async def test_a_png_is_exact_and_what_the_answer_lacks_is_an_error(tmp_path: Path) -> None:
    result, _ = await asked("a red circle", "--out", tmp_path / "red.png")
    assert result.exit_code == 0
    with Image.open(tmp_path / "red.png") as image:
        assert np.array_equal(np.asarray(image), PIXELS)
    result, [] = await asked("a red circle", "--out", tmp_path / "red.wav")
    assert "output_modalities" in str(result.exception)
    assert not (tmp_path / "red.wav").exists()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--out", "red.txt"], "expected a file name that ends in one of .png"),
        (["--size", "64x64"], "--size is that of an image"),
        (["--seconds", "2"], "--seconds is that of a video"),
        (["--out", "red.png", "--seconds", "2"], "--seconds is that of a video"),
        (["--out", "/nowhere/red.png"], "there is no folder /nowhere"),
        (["--out", "/proc/red.png"], "/proc/red.png cannot be written"),
        (["--output-dir", "/proc/new"], "/proc/new cannot be written to"),
        (["--out", "red.png", "--output-dir", "folder"], "use one of them"),
        (["--out", "red.png", "--size", "huge"], "expected WIDTHxHEIGHT"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], found: str) -> None:
    result = CliRunner().invoke(ask, ["a circle", *arguments, "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert found in result.output + str(result.exception)
