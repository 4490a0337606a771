"""The demo that sees, as the front page tells a newcomer to use it."""

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai import OpenAI
from PIL import Image

from configs.demo_vision import pictures
from tests.e2e.deploy import Running, serve

RED: Final = Path(pictures.__file__).parent / "red-circle.png"
ANSWER: Final = "A red circle on a white background."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("demo-vision"), model="demo-vision") as found:
        yield found


def image(png: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_it_names_colour_and_shape_on_the_command_line(running: Running) -> None:
    command = [sys.executable, "-m", "dalsegno", "ask", "--url", running.url, "--file", str(RED)]
    told = subprocess.run([*command, "What is it?"], capture_output=True, text=True, check=True)

    assert told.stdout == f"{ANSWER}\n"


def test_openais_client_asks_about_several_pictures_and_goes_on(running: Running, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "yellow").save(tmp_path / "plain.png")
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")

    def answer(messages: Any) -> str | None:
        made = client.chat.completions.create(model="demo-vision", messages=messages, temperature=0)
        assert made.usage is not None
        return made.choices[0].message.content

    red = image(RED.read_bytes())
    several = [red, red, {"type": "text", "text": "What are these?"}]
    both = answer([{"role": "user", "content": several}])
    assert both == f"{ANSWER[:-1]}, then a red circle on a white background."
    chat: list[dict[str, Any]] = [{"role": "user", "content": [red, {"type": "text", "text": "What is it?"}]}]
    assert answer(chat) == ANSWER
    chat += [
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "What colour is the background?"},
    ]
    assert answer(chat) == "White."
    assert answer([{"role": "user", "content": "What is it?"}]) == "Please show me a picture."
    plain = image((tmp_path / "plain.png").read_bytes())
    assert "yellow" in (answer([{"role": "user", "content": [plain]}]) or "")
