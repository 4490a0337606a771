"""docs/clients.md: every program and every command has the effect that the page describes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from dalsegno.client import request as question
from tests.e2e import clients
from tests.e2e.clients import Ended
from tests.e2e.deploy import Running
from tests.e2e.pages import blocks, sessions

PAGE: Final = (clients.ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
NATS_PAGE: Final = (clients.ROOT / "docs" / "nats.md").read_text(encoding="utf-8")
EXAMPLES: Final = clients.ROOT / "docs" / "examples"
LEN: Final = "Return the number of items in a container."
ZIP: Final = (
    "The zip object yields n-length tuples, where n is the number of iterables passed as positional "
    "arguments to zip()."
)
ABS: Final = "Return the absolute value of the argument."
has_node: Final = pytest.mark.skipif(
    shutil.which("node") is None or not (EXAMPLES / "node_modules").exists(),
    reason="needs node, and `npm install` in docs/examples",
)


def pointed_at(running: Running, program: str) -> str:
    """A program of the page, with the addresses of a deployment."""
    for shown, real in (
        ("http://127.0.0.1:8000", running.url),
        ("nats://127.0.0.1:4222", running.nats_url),
        ('"ready.json"', repr(str(running.ready_file))),
    ):
        program = program.replace(shown, real)
    return program


def run(*command: str, cwd: Path | None = None) -> Ended:
    env = {**os.environ, "PYTHONPATH": str(clients.ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=clients.PATIENCE_S, cwd=cwd, env=env
    )


def test_every_python_program_prints_what_it_is_to(deployment: Running) -> None:
    printed = []
    for program in blocks(PAGE, "python"):
        ended = run(sys.executable, "-c", pointed_at(deployment, program))
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout.splitlines())

    first, nats, loop, several, resumed, errors, media, openai, tools, anthropic, ollama = printed
    assert first[:4] == [LEN, "stop 11", ZIP, ABS]
    assert first[4] == "['demo'] True"
    assert nats == several == openai == anthropic == ollama == [LEN]
    assert loop == [f"{LEN} stop"]
    asked = [line for line in resumed if not line.startswith("again")]
    assert asked[0] == "0 'Return'"
    assert resumed[len(asked) :] == ["again True"] * (len(asked) - 1)
    assert errors == ["404 model_not_found model"]
    assert media == ["unsupported_modality"]
    assert tools == ["Weather Weather"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
def test_every_command_gives_the_answer_shown(deployment: Running) -> None:
    told = list(sessions(PAGE))
    assert len(told) == 2

    for command, shown in told:
        ended = run("bash", "-c", pointed_at(deployment, command))
        assert ended.stdout.strip() == shown, command


def test_everything_that_may_be_said_is_on_the_page() -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith("Optional arguments:")]
    said = set(re.findall(r"`(\w+)=", line))

    assert said == {*question.RequestOptions.__annotations__, "messages", "request_id"}


# ---- JavaScript ----------------------------------------------------------------------------------------


@has_node
def test_the_node_program_prints_the_answer(deployment: Running, tmp_path: Path) -> None:
    [program] = blocks(PAGE, "javascript")
    (tmp_path / "node_modules").symlink_to(EXAMPLES / "node_modules")
    (tmp_path / "ask.mjs").write_text(pointed_at(deployment, program))
    ended = run("node", "ask.mjs", cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, LEN), ended.stderr


@has_node
@pytest.mark.parametrize(
    ("model", "status", "out", "err"), [("demo", 0, f"{LEN}\n", "stop"), ("none", 1, "", "model_not_found")]
)
def test_the_nats_example_for_node_prints_the_answer_or_why_there_is_none(
    model: str, status: int, out: str, err: str, deployment: Running
) -> None:
    script = clients.example("ask.mjs")
    ended = run("node", str(script), str(deployment.ready_file), model, "What does len do?")

    assert (ended.returncode, ended.stdout) == (status, out), ended.stderr
    assert err in ended.stderr


def test_the_nats_page_shows_the_node_example_as_it_is_and_it_imports_nothing_of_ours() -> None:
    script = clients.example("ask.mjs").read_text(encoding="utf-8")
    needed = json.loads((EXAMPLES / "package.json").read_text())["dependencies"]
    imported = set(re.findall(r'from "([^"]+)"', script))

    assert f"```javascript\n{script}```" in NATS_PAGE
    assert {name for name in imported if not name.startswith("node:")} == set(needed) - {"openai"}
