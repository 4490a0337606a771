"""The two guides, followed like a reader; each on its own deployment, to kill and start roles in."""

import json
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest

from dalsegno.config.layers import KEYS
from tests.e2e import deploy, pages
from tests.e2e.clients import PATIENCE_S
from tests.tiny.orpheus import tiny_orpheus
from workers.settings import EngineSettings

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' commands are curl's")
OF_THE_ENGINE: Final = {field.name for field in msgspec.structs.fields(EngineSettings)}
ORPHEUS_3B: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "torch_dtype": "bfloat16", "vocab_size": 156_940,
}  # fmt: skip
"""As much of its checkpoint as `dalsegno check` looks at, beside a tokenizer."""
OTHER_URL: Final = "http://127.0.0.1:8001"


def test_the_first_ten_minutes_are_as_they_are_told(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    with deploy.serve(tmp_path) as running:
        terminal = pages.Terminal(tmp_path / "clone", pages.Place.of(running))
        pages.run(pages.Page("docs/quickstart.md"), terminal)


def test_a_deployment_of_single_roles_runs_as_the_serving_guide_says(tmp_path: Path) -> None:
    page = pages.Page("docs/serving.md")
    nats, first, second = free_ports(3)
    place = pages.Place(
        real={
            pages.URL: f"http://127.0.0.1:{first}",
            OTHER_URL: f"http://127.0.0.1:{second}",
            "--port 8001": f"--port {second}",
            "127.0.0.1:4222": f"127.0.0.1:{nats}",
        },
        variables={"DALSEGNO_GATEWAY_PORT": str(first), "DALSEGNO_MODEL_KWARGS": "{device: cpu}"},
    )
    terminal = pages.Terminal(tmp_path, place)
    (tmp_path / "orpheus-3b").mkdir()
    (tmp_path / "orpheus-3b" / "config.json").write_text(json.dumps(ORPHEUS_3B))
    shutil.copy(tiny_orpheus() / "tokenizer.json", tmp_path / "orpheus-3b")
    terminal.write("nats.conf", pages.blocks(page.text, "text")[0])
    ready = iter((first, second))

    def begin(command: str) -> bool:
        match pages.words(command):
            case ["nats-server", *_]:
                terminal.begin(command)
                wait_for_port(nats)
            case ["dalsegno", "gateway", *_]:
                terminal.begin(command)
                wait_until_ready(next(ready), tmp_path)
            case ["dalsegno", "conductor" | "worker", *_]:
                terminal.begin(command)
            case _:
                return False
        return True

    try:
        pages.run(page, terminal, begin=begin)
        assert list(ready) == []
    finally:
        terminal.close()


def test_a_deployment_with_a_key_for_each_role_runs_as_the_page_says(tmp_path: Path) -> None:
    nats, monitor, http = free_ports(3)
    place = pages.Place(
        real={pages.URL: f"http://127.0.0.1:{http}", "localhost:4222": f"localhost:{nats}"},
        variables={"DALSEGNO_GATEWAY_PORT": str(http), "DALSEGNO_MODEL_KWARGS": "{device: cpu}"},
    )
    terminal = pages.Terminal(tmp_path, place)

    def begin(command: str) -> bool:
        match pages.words(command):
            case ["nats-server", *_]:
                configuration = tmp_path / "security" / "nats-server.conf"
                told = configuration.read_text().replace("0.0.0.0:4222", f"127.0.0.1:{nats}")
                configuration.write_text(told.replace("127.0.0.1:8222", f"127.0.0.1:{monitor}"))
                terminal.begin(command)
                wait_for_port(nats)
            case ["dalsegno", "gateway", *_]:
                terminal.begin(command)
                wait_until_ready(http, tmp_path)
            case ["dalsegno", "conductor" | "worker", *_]:
                terminal.begin(command)
            case _:
                return False
        return True

    try:
        pages.run(pages.Page("docs/security.md"), terminal, begin=begin)
    finally:
        terminal.close()


def test_the_serving_guide_names_nothing_that_is_not_there() -> None:
    text = pages.Page("docs/serving.md").text
    known = set(KEYS) | {key.rpartition(".")[2] for key in KEYS}
    tables = re.findall(r"^\| key.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    cells = [row[0] for table in tables for row in rows_of(table)]

    assert len(cells) > 20
    for cell in cells:
        assert {name.removeprefix("model_kwargs.") for name in pages.named(cell)} <= known | OF_THE_ENGINE


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


def free_ports(count: int) -> list[int]:
    """Unused ports."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


def wait_for_port(port: int) -> None:
    """Poll a port, because another process opens it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return


def wait_until_ready(port: int, folder: Path) -> None:
    wait_for_port(port)
    deadline = time.monotonic() + PATIENCE_S
    while httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=30).status_code != 200:
        assert time.monotonic() < deadline, (folder / "begun.txt").read_text()
        time.sleep(0.02)
