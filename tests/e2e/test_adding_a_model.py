"""`docs/adding-a-model.md`: an external family is served, streamed, replayed; the page shows its files."""

import os
import subprocess
import sys
import tomllib
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from tests.e2e import clients, deploy, pages

FAMILY: Final = clients.ROOT / "docs" / "examples" / "shout"
STREAMING: Final = clients.ROOT / "models" / "orpheus" / "graph.py"
"""What the page shows of parts that run at the same time."""
PAGE: Final = pages.Page("docs/adding-a-model.md")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The family as if pip had installed it: its package on the path, and its entry point."""
    points = tomllib.loads((FAMILY / "pyproject.toml").read_text())["project"]["entry-points"]
    site = tmp_path_factory.mktemp("site")
    info = site / "shout-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of_group.items())
        for group, of_group in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join((str(site), str(FAMILY)))}


@pytest.fixture(scope="module")
def shouting(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[deploy.Running]:
    folder = tmp_path_factory.mktemp("shout")
    with deploy.serve(folder, model=str(FAMILY / "shout.yaml"), env=environment) as running:
        yield running


def generate(running: deploy.Running, text: str, **kwargs: object) -> list[dict[str, Any]]:
    body = {"text": text, "model_kwargs": kwargs}
    answer = httpx.post(f"{running.url}/generate", json=body, timeout=60)
    return [msgspec.json.decode(line) for line in answer.text.splitlines()]


def text_of(chunk: dict[str, Any]) -> str:
    return b64decode(chunk["data"]).decode()


def test_a_family_from_outside_answers_and_streams_word_by_word(shouting: deploy.Running) -> None:
    *chunks, end = generate(shouting, "hello dear world")

    assert [text_of(chunk) for chunk in chunks] == ["HELLO! ", "DEAR! ", "WORLD! "]
    assert end["metadata"] == {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "durability": "process",
    }


def test_its_plan_obeys_the_limit(shouting: deploy.Running) -> None:
    *chunks, end = generate(shouting, "hello dear world", max_tokens=1)

    assert [text_of(chunk) for chunk in chunks] == ["HELLO! "]
    assert end["metadata"]["finish_reason"] == "length"


def test_an_error_of_its_plan_is_the_clients(shouting: deploy.Running) -> None:
    [error] = generate(shouting, "  ")

    assert error["error"]["code"] == "no_words"


def test_its_requests_replay(shouting: deploy.Running, environment: dict[str, str]) -> None:
    generate(shouting, "once more")

    replayed = subprocess.run(
        [sys.executable, "-m", "dalsegno", "replay", "--all", "--data-dir", str(shouting.data_dir)],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip

    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_the_pages_commands_give_what_is_shown(shouting: deploy.Running, tmp_path: Path) -> None:
    terminal = pages.Terminal(tmp_path, pages.Place.of(shouting))

    pages.run(PAGE, terminal, runs_programs=False)


@pytest.mark.parametrize("name", ["shout/graph.py", "shout/processing.py", "shout.yaml", "pyproject.toml"])
def test_the_page_shows_the_files_as_they_are(name: str) -> None:
    source = (FAMILY / name).read_text()
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}[Path(name).suffix]
    shown = pages.blocks(PAGE.text, language)

    assert any(block in source for block in shown)
    sources = (FAMILY / "shout" / "graph.py", FAMILY / "shout" / "processing.py", STREAMING)
    assert language != "python" or all(
        any(block in source.read_text() for source in sources) for block in shown
    )
