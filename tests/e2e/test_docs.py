"""The pages are correct: every command gives the output shown, every table is complete."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, get_args

import click
import msgspec
import pytest
import yaml

from configs import checks, files
from configs.deployment import SECTIONS, DeploymentConfig, NodeGroup
from dalsegno.config import environment
from gateway import errors
from gateway.generate import request as generate_request
from gateway.images.request import VariationRequest
from gateway.openai import requests as openai_requests
from gateway.openai.request_fields import FIELDS
from gateway.sound.encoder import FORMATS
from gateway.speech.request import SpeechRequest
from gateway.texts.embeddings import EmbeddingRequest
from gateway.texts.encodings import Encoding
from gateway.texts.rerank import RerankRequest
from gateway.videos.request import GenerationRequest
from tests.e2e import clients, pages
from tests.e2e.deploy import Running
from tests.e2e.pages import named, rows
from tests.tiny import tiny_checkpoint
from workers import settings
from workers.settings import EngineSettings

HTTP: Final = pages.Page("docs/http.md").text
CONFIGURATION: Final = pages.Page("docs/configuration.md").text
ON_THE_DEMO: Final = (
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks/README.md",
    "deploy/README.md",
    "docs/configuration.md",
    "docs/http.md",
    "docs/durability.md",
    "docs/operations.md",
    "docs/replay.md",
    "docs/studio.md",
)
"""Pages that are run on the deployment all tests share."""
ELSEWHERE: Final = {
    "docs/adding-a-model.md": "tests/e2e/test_adding_a_model.py",
    "docs/attacks.md": "tests/attack/test_attacks.py",
    "docs/chaos.md": "tests/chaos/test_chaos.py",
    "docs/clients.md": "tests/e2e/test_clients_page.py",
    "docs/nats.md": "tests/e2e/test_nats.py",
    "docs/quickstart.md": "tests/e2e/test_guides.py",
    "docs/security.md": "tests/e2e/test_guides.py",
    "docs/serving.md": "tests/e2e/test_guides.py",
    "docs/walks.md": "tests/shared/walks/test_page.py",
}
"""Pages that need a deployment of their own, or none; and who runs them."""
ALL_PAGES: Final = [page.name for page in pages.all_pages()]
NOT_IN_THE_INDEX: Final = {
    "CHANGELOG.md",
    "README.md",
    "benchmarks/README.md",
    "configs/demo/README.md",
    "configs/demo_diffusion/README.md",
    "configs/demo_draw/README.md",
    "configs/demo_vision/README.md",
}
"""What the front page leads to, or is."""


# ---- commands, programs, settings ----------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' commands are curl's")
@pytest.mark.parametrize("name", ON_THE_DEMO)
def test_every_command_and_program_of_a_page_gives_what_is_shown(
    name: str, deployment: Running, tmp_path: Path
) -> None:
    pages.run(pages.Page(name), pages.Terminal(tmp_path, pages.Place.of(deployment)))


def test_no_page_is_left_out() -> None:
    runnable = {page.name for page in pages.all_pages() if page.typed or page.programs}

    assert runnable == {*ON_THE_DEMO, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (clients.ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_command_in_a_sentence_can_be_said(name: str) -> None:
    for command in pages.Page(name).said:
        pages.parse(command)


def test_what_is_parsed_only_has_a_reason_that_is_needed() -> None:
    typed = [one for page in pages.all_pages() for one in page.typed]
    beginnings = {" ".join(pages.words(one.command)) for one in typed if one.reason_not_to_run}

    for key in pages.NOT_RUN:
        assert any(words.startswith(key) for words in beginnings), key


@pytest.mark.parametrize(
    "command", ["make sreve", "make bench ARGS=sreving", "dalsegno serve", "docker compose pause worker"]
)
def test_a_command_that_could_not_be_run_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, click.UsageError, subprocess.CalledProcessError)):
        pages.parse(command)


@pytest.mark.parametrize(
    ("shown", "came", "does"),
    [
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a\n...", "a", True),
        ("a", "a\nb", False),
        ("a ... c", "a b c", True),
        ("a ... c", "a\nb c", False),
        ("a.c", "abc", False),
        ('{"pid":1,"n":2}', '{"pid":7,"n":2}', True),
        ('{"pid":1,"n":2}', '{"pid":7,"n":3}', False),
    ],
)
def test_what_came_is_held_against_what_is_shown(shown: str, came: str, does: bool) -> None:
    assert pages.agrees(shown, came) == does


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name in ALL_PAGES for text in pages.blocks(pages.Page(name).text, "yaml")],
)
def test_every_configuration_of_a_page_can_be_served(name: str, text: str, tmp_path: Path) -> None:
    raw = yaml.safe_load(text)
    if raw.get("model", "decoder_lm") != "decoder_lm":
        assert name in ELSEWHERE
        return
    base = yaml.safe_load((files.configs_folder() / "demo.yaml").read_text())
    whole = raw if "model" in raw else {**base, **raw}
    checkpoint = tmp_path / whole["checkpoint"]
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.symlink_to(tiny_checkpoint(), target_is_directory=True)
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(whole))

    settings.parse(checks.resolve(str(tmp_path / "page.yaml")).model_kwargs)


# ---- links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = pages.Page(name)

    assert [target for target in page.links if not pages.leads_somewhere(page, target)] == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    page = pages.Page("docs/http.md")

    assert pages.leads_somewhere(page, "#errors")
    assert pages.leads_somewhere(page, "operations.md#series")
    assert not pages.leads_somewhere(page, "#mistakes")
    assert not pages.leads_somewhere(page, "htpp.md")
    assert not pages.leads_somewhere(page, "nats.md#errors")


def test_every_page_is_in_the_index() -> None:
    index = pages.Page("docs/README.md")
    found = {(index.path.parent / target).resolve() for target in index.links}

    for name in set(ALL_PAGES) - NOT_IN_THE_INDEX - {index.name}:
        path = clients.ROOT / name
        assert path in found or path.parent in found, name


# ---- tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("## Keys", DeploymentConfig),
        ("## `node_groups`", NodeGroup),
        ("## `model_kwargs`", EngineSettings),
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
        environment.NATS_TOKEN, environment.NATS_TOKEN_FILE, environment.NATS_USER, environment.NATS_PASSWORD,
        environment.NATS_SEED, environment.NATS_CREDENTIALS_FILE, environment.DATA_DIR, environment.API_KEY,
        environment.HUB_CACHE, environment.HUB_HOME, environment.HUB_ENDPOINT, environment.HUB_TOKEN,
        *environment.HUB_OFFLINE, environment.NO_COLOR, environment.FAULT,
    ]  # fmt: skip


def test_every_field_of_generate_is_in_its_table() -> None:
    told = rows(HTTP, "## `POST /generate`")
    head = next(place for place, row in enumerate(told) if row[0] == "name")

    assert [row[0].strip("`") for row in told[1:head]] == list(generate_request.FIELDS)
    assert set().union(*(named(row[0]) for row in told[head + 1 :])) == set(generate_request.MODEL_KWARGS)


def test_every_role_of_a_message_is_in_the_table_of_fields() -> None:
    [messages] = [field.note for field in FIELDS if field.name == "messages"]

    assert set(openai_requests.ROLES) <= named(messages)


def test_every_field_of_speech_is_in_its_table() -> None:
    told = rows(HTTP, "## `POST /v1/audio/speech`")[1:]
    fields = {field.encode_name for field in msgspec.structs.fields(SpeechRequest)} - {"model"}
    assert set().union(*(named(row[0]) for row in told)) == fields
    assert set(FORMATS) <= set().union(*(named(row[1]) for row in told))


def test_every_field_of_images_and_videos_is_in_its_table() -> None:
    kinds: dict[str, type[msgspec.Struct]] = {
        "## Images": VariationRequest,
        "## Videos": GenerationRequest,
    }
    for heading, kind in kinds.items():
        told = set().union(*(named(row[0]) for row in rows(HTTP, heading)))
        assert {field.encode_name for field in msgspec.structs.fields(kind)} <= told, heading


def test_every_field_of_the_routes_for_texts_is_in_its_table() -> None:
    kinds: dict[str, type[msgspec.Struct]] = {"embeddings": EmbeddingRequest, "rerank": RerankRequest}
    for route, kind in kinds.items():
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        told = set().union(*(named(row[0]) for row in rows(HTTP, f"## `POST /v1/{route}`")[1:]))
        assert fields <= told, route
    encodings = {row[0].strip("`") for row in rows(HTTP, "### Encodings of embeddings")[1:]}
    assert encodings == set(get_args(Encoding))


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
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "server.py"]
    for code in re.findall(r'\bcode ?= ?"([a-z_]+)"', "\n".join(sources)):
        assert code in said
