import ast
import json
import shlex
import textwrap
from pathlib import Path

import pytest

from dalsegno.config.address import Listen
from dalsegno.serve import ready_message as module


def welcome(model: str, listen: Listen, data_dir: Path, seconds: float, *, has_page: bool = True) -> str:
    return module.ready_message(
        model,
        [listen],
        data_dir,
        seconds,
        modalities=("text",),
        outputs=("text",),
        voices=(),
        durability="host",
        has_page=has_page,
    )


def test_what_is_shown_names_the_address_the_model_and_the_data_dir() -> None:
    shown = welcome("demo", Listen(host="0.0.0.0", port=9000), Path("/data"), seconds=5.02)
    assert "Dal Segno serves demo at http://127.0.0.1:9000 (ready after 5.0 s)" in shown
    assert 'ask "What does len do?" --url http://127.0.0.1:9000\n' in shown
    assert 'base_url="http://127.0.0.1:9000/v1"' in shown
    assert "studio /data\n" in shown
    assert "Data dir: /data\n" in shown
    assert "Durability: host; acked events survive the end of the NATS server's machine." in shown


def test_what_is_shown_can_be_pasted_whatever_the_model_is_called() -> None:
    name = 'it\'s "größer" 😀'
    shown = welcome(name, Listen(host="127.0.0.1", port=8000), Path("/data"), seconds=5).splitlines()
    [curl] = [shlex.split(line) for line in shown if line.startswith("  curl ")]
    begin = shown.index("  from openai import OpenAI")
    program = ast.parse(textwrap.dedent("\n".join(shown[begin : begin + 4])))

    assert curl[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert curl[3:6] == ["-H", "content-type: application/json", "-d"]
    assert json.loads(curl[6])["model"] == name
    assert name in {node.value for node in ast.walk(program) if isinstance(node, ast.Constant)}


def test_the_page_is_named_unless_it_is_off() -> None:
    listen = Listen(host="127.0.0.1", port=9000)

    assert "\nIn a browser: http://127.0.0.1:9000\n" in welcome("demo", listen, Path("/data"), seconds=5)
    assert "browser" not in welcome("demo", listen, Path("/data"), seconds=5, has_page=False)


def test_at_the_usual_port_ask_needs_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = welcome("demo", Listen(host="127.0.0.1", port=8000), Path("/data"), seconds=5)
    assert "--url" not in shown


def test_a_model_that_speaks_is_let_speak() -> None:
    listen = Listen(host="127.0.0.1", port=8000)
    shown = module.ready_message(
        "orpheus",
        [listen, Listen(host="127.0.0.1", port=8001)],
        Path("/data"),
        5.0,
        modalities=("text",),
        outputs=("audio",),
        voices=("tara", "leah"),
        durability="process",
    )
    [curl] = [shlex.split(line) for line in shown.splitlines() if line.startswith("  curl ")]
    _, _, program = shown.partition("  from openai")
    code = ast.parse(textwrap.dedent(f"  from openai{program.partition('Its other')[0]}"))
    assert "Its other gateways: http://127.0.0.1:8001\nData dir" in shown

    assert curl[:4] == ["curl", "http://127.0.0.1:8000/v1/audio/speech", "-o", "speech.wav"]
    assert curl[4:7] == ["-H", "content-type: application/json", "-d"]
    asked = json.loads(curl[7])
    assert (asked["model"], asked["voice"], asked["response_format"]) == ("orpheus", "tara", "wav")
    assert {"orpheus", "tara", "wav", asked["input"]} <= {
        node.value for node in ast.walk(code) if isinstance(node, ast.Constant)
    }
    assert "ask" not in shown.split()


@pytest.mark.parametrize(
    ("modalities", "outputs", "shown"),
    [
        (("text", "image"), ("text",), "-F files=@picture.png -F text='What is in the picture?'"),
        (("video", "image"), ("video",), "-F files=@clip.mp4 -F streaming=false -F tensor_format=npz"),
        (("image",), ("embedding",), "-F files=@picture.png -F streaming=false -F tensor_format=npz"),
    ],
)
def test_a_model_that_takes_files_is_given_one(
    modalities: tuple[str, ...], outputs: tuple[str, ...], shown: str
) -> None:
    message = module.ready_message(
        "mine",
        [Listen(host="127.0.0.1", port=9000)],
        Path("/data"),
        5.0,
        modalities=modalities,
        outputs=outputs,
        voices=(),
        durability="process",
    )

    assert f"http://127.0.0.1:9000/generate {shown}" in message
    asks = 'ask --file picture.png "What is in the picture?" --url http://127.0.0.1:9000' in message
    assert asks == ("text" in outputs)
    assert "len" not in message.split()


@pytest.mark.parametrize(
    ("modalities", "outputs", "commands"),
    [
        (
            ("text", "image"),
            ("image", "text"),
            ['ask "a red circle" --out picture.png', "ask --file picture.png"],
        ),
        (("text",), ("image",), ['ask "a red circle" --out picture.png']),
        (("text", "image"), ("video",), ['ask "a red circle" --out film.mp4']),
        (("text",), ("embedding",), ["curl http://127.0.0.1:8000/v1/embeddings"]),
        (
            ("audio",),
            ("text", "transcript"),
            ["curl http://127.0.0.1:8000/v1/audio/transcriptions -F model=mine -F file=@talk.mp3"],
        ),
        (("text",), ("score",), ["curl http://127.0.0.1:8000/v1/rerank"]),
        (("text", "image", "tensor"), ("action",), ['WebsocketClientPolicy("127.0.0.1", 8000)']),
    ],
)
def test_a_model_is_asked_for_what_it_makes(
    modalities: tuple[str, ...], outputs: tuple[str, ...], commands: list[str]
) -> None:
    message = module.ready_message(
        "mine",
        [Listen(host="127.0.0.1", port=8000)],
        Path("/data"),
        5.0,
        modalities=modalities,
        outputs=outputs,
        voices=(),
        durability="process",
    )

    assert all(command in message for command in commands)
    assert ("generate" in message) == ("text" in outputs and "transcript" not in outputs)
