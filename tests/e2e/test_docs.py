"""The pages say what is so: every command on them gives the answer shown, every table is complete."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec
import pytest
import yaml

from dalsegno import environment
from dalsegno.cli import main
from gateway import errors, generate_request, openai_requests
from gateway.openai_requests import ChatRequest, CompletionRequest
from shared import config
from shared.config import SECTIONS, DeploymentConfig, NodeGroup
from tests.e2e import clients
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint
from workers import settings
from workers.settings import EngineSettings

HTTP: Final = (clients.ROOT / "docs" / "http.md").read_text(encoding="utf-8")
CONFIGURATION: Final = (clients.ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
README: Final = (clients.ROOT / "README.md").read_text(encoding="utf-8")
_URL: Final = "http://127.0.0.1:8000"
_CHANGING: Final = (
    "avg_latency_s", "avg_throughput_tok_s", "created", "ended", "epoch", "incarnation",
    "inflight_per_engine", "inflight_total", "kv_total", "kv_used", "open", "pid", "running", "seq", "silent_s",
    "prefill_misses", "prefix_misses", "state", "steps", "version", "waiting",
)  # fmt: skip
_OTHERS_EVERY_TIME: Final = (
    (re.compile(rf'("(?:{"|".join(_CHANGING)})":)[^,}}]+'), r"\1_"),
    (re.compile(r"\b(c|g)-[0-9a-f]{8}\b"), r"\1-_"),
    (re.compile(r"sequence \d+ of the log"), "sequence _ of the log"),
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def sessions(page: str) -> Iterator[tuple[str, str]]:
    """Each command of the page's terminals, and what is shown behind it."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown.strip()


def masked(text: str) -> str:
    for pattern, replacement in _OTHERS_EVERY_TIME:
        text = pattern.sub(replacement, text)
    return text


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of every table under a heading."""
    section = page.split(f"\n{heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and "|---" not in line]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


# ---- commands ----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
def test_every_command_of_the_http_page_gives_the_answer_shown(deployment: Running) -> None:
    told = list(sessions(HTTP))
    assert len(told) > 8

    for command, shown in told:
        ended = subprocess.run(
            ["bash", "-c", command.replace(_URL, deployment.url)],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert masked(ended.stdout.strip()) == masked(shown), command


def test_every_program_of_the_http_page_runs(deployment: Running) -> None:
    ended = [
        subprocess.run(
            [sys.executable, "-c", program.replace(_URL, deployment.url)],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for program in blocks(HTTP, "python")
    ]  # fmt: skip

    assert ended[0].endswith(" stop\n")
    assert ended[1] == "Return a new list containing all items from the iterable in ascending order."


def test_the_commands_of_the_configuration_page_can_be_said() -> None:
    told = list(sessions(CONFIGURATION))
    assert len(told) == 5

    for command, _ in told:
        program, name, *args = shlex.split(command, comments=True)
        found = main.get_command(click.Context(main), name)
        assert program == "dalsegno"
        assert found is not None
        found.make_context(name, args)


def test_the_configuration_of_the_page_can_be_served(tmp_path: Path) -> None:
    [shown] = blocks(CONFIGURATION, "yaml")
    raw = yaml.safe_load(shown)
    (tmp_path / raw["checkpoint"]).symlink_to(tiny_checkpoint(), target_is_directory=True)
    (tmp_path / "qwen3.yaml").write_text(shown)

    found = config.resolve(str(tmp_path / "qwen3.yaml"))

    assert (found.name, found.max_seq_len) == ("qwen3", 8192)
    assert settings.parse(found.model_kwargs).max_rows == 64


# ---- tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("## Keys", DeploymentConfig),
        ("## `node_groups`", NodeGroup),
        ("## `model_kwargs` of `decoder_lm`", EngineSettings),
        *((f"## `{name}`", kind) for name, kind in SECTIONS.items()),
    ],
)
def test_every_key_is_in_its_table_with_its_default(heading: str, kind: type[msgspec.Struct]) -> None:
    _, *told = rows(CONFIGURATION, heading)
    defaults = {key.strip("`"): default for key, _, default, _ in told}
    fields = msgspec.structs.fields(kind)

    assert list(defaults) == [field.encode_name for field in fields]
    for field in fields:
        shown = defaults[field.encode_name]
        assert (shown == "required") == field.required
        if type(field.default) is int or field.default == "auto":
            assert shown == f"`{field.default}`"


def test_every_variable_is_in_its_table() -> None:
    _, *told = rows(CONFIGURATION, "## Environment variables")

    assert [key.strip("`") for key, _ in told] == [
        environment.NATS_TOKEN, environment.NATS_TOKEN_FILE, environment.DATA_DIR, environment.API_KEY,
        environment.NO_COLOR,
    ]  # fmt: skip


def test_every_field_of_generate_is_in_its_table() -> None:
    told = rows(HTTP, "## `POST /generate`")
    head = next(place for place, row in enumerate(told) if row[0] == "name")

    assert [row[0].strip("`") for row in told[1:head]] == list(generate_request.FIELDS)
    assert set().union(*(named(row[0]) for row in told[head + 1 :])) == set(generate_request.MODEL_KWARGS)


def test_every_field_of_openais_is_in_its_table() -> None:
    told = rows(HTTP, "## OpenAI's routes")
    head = next(place for place, row in enumerate(told) if row[0] == "refused")
    taken, refused = told[1:head], told[head + 1 :]

    for column, kind in ((1, ChatRequest), (2, CompletionRequest)):
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert {row[0].strip("`") for row in taken if row[column] == "yes"} == fields
    for name, kind in (("chat", ChatRequest), ("completions", CompletionRequest)):
        shown = {
            field: [json.loads(value) for value in _values(row[2])]
            for row in refused
            if row[1] in ("both", name)
            for field in named(row[0])
        }
        assert shown == {field: list(neutral) for field, neutral in kind.neutral.items()}
    [messages] = [row[3] for row in taken if row[0] == "`messages`"]
    assert set(openai_requests.ROLES) <= named(messages)


def _values(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell) or re.findall(r"\d+", cell)


def test_every_status_and_every_code_of_the_gateway_is_in_the_table() -> None:
    told: dict[int, tuple[str, set[str]]] = {}
    for status, type_, codes, _ in rows(HTTP, "## Errors")[1:]:
        if status:
            told[int(status)] = (type_.strip("`"), set())
        told[max(told)][1].update(named(codes))

    assert {status: type_ for status, (type_, _) in told.items()}.items() <= errors.TYPES.items()
    said = set().union(*(codes for _, codes in told.values()))
    folder = Path(errors.__file__).parent
    sources = [path.read_text() for path in folder.glob("*.py") if path.name != "server.py"]
    for code in re.findall(r'\bcode ?= ?"([a-z_]+)"', "\n".join(sources)):
        assert code in said


# ---- links -------------------------------------------------------------------------------------------


def test_the_readme_leads_to_both_pages() -> None:
    for page in ("docs/http.md", "docs/configuration.md"):
        assert f"({page})" in README
