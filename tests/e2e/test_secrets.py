"""No key and no prompt in a deployment's output to its operator, whatever is requested and fails."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from shared.log.nats.credentials import Credentials
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running

SECRET: Final = "xyzzy"
"""In every prompt, in every wrong value, and in every key: nothing else is made of these letters."""
QUOTATION: Final = "not an event of this version"
"""How a message begins that goes on with what a client published."""
KEY: Final = f"sk-{SECRET}-right"
MESSAGES: Final = [{"role": "user", "content": f"{SECRET}?"}]
CHAT: Final[dict[str, Any]] = {"model": "demo", "messages": MESSAGES, "max_tokens": 4}


@dataclass(frozen=True)
class Said:
    """A deployment's output: terminal and files; and the secrets of its NATS credentials.

    Attributes:
        shown: the secrets of the client, of the reader and of each role; the roles' only of programs.
        commands: the command lines of all processes, as `/proc` has them.
        environments: the environment of each role, as `/proc` has it.
    """

    terminal: str
    files: dict[str, str]
    shown: list[str]
    commands: list[str]
    environments: list[str]

    @property
    def all(self) -> str:
        return "\n".join([self.terminal, *self.files.values()])


async def everything(running: Running, conductor: Credentials | None) -> list[int]:
    """Send valid and invalid requests on every route; return the statuses."""
    found: list[int] = []
    key = {"Authorization": f"Bearer {KEY}"}
    chat, generate, completions = "/v1/chat/completions", "/generate", "/v1/completions"
    bodies: list[tuple[str, Any]] = [
        (chat, CHAT),
        (chat, CHAT | {"stream": True}),
        (completions, {"model": "demo", "prompt": SECRET, "max_tokens": 2, "n": 2}),
        (generate, {"text": SECRET, "model_kwargs": {"max_tokens": 2}}),
        (generate, {"text": SECRET, "request_id": "one", "streaming": False}),
        (generate, {"text": f"other {SECRET}", "request_id": "one"}),  # another body under its id
        (chat, CHAT | {"temperature": SECRET}),
        (chat, CHAT | {SECRET: 1, "max_tokens": SECRET}),
        (chat, CHAT | {"model": SECRET}),
        (chat, CHAT | {"request_id": f"{SECRET} {SECRET}"}),
        (chat, CHAT | {"stop": [SECRET] * 99}),
        (chat, CHAT | {"messages": [{"role": SECRET, "content": SECRET}]}),
        (chat, CHAT | {"messages": [{"role": "user", "content": SECRET * 2000}]}),  # too long a prompt
        (chat, CHAT | {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]}),
        (chat, CHAT | {"messages": [{"role": "tool", "content": SECRET}]}),
        (generate, {"text": SECRET, "model_kwargs": {SECRET: 1}}),
        (generate, {"text": SECRET, "input_modalities": SECRET}),
        (generate, {"txt": SECRET}),
        (completions, {"model": "demo", "prompt": [2**31 - 1]}),
        ("/v1/responses", {"input": SECRET}),
        ("/nowhere", {"input": SECRET}),
    ]
    async with httpx.AsyncClient(base_url=running.url, timeout=60, headers=key) as client:
        for path, body in bodies:
            found.append((await client.post(path, json=body)).status_code)
        for content in (f'{{"{SECRET}"', f'"{SECRET}"', f'{{"model": "\\ud800{SECRET}"}}', SECRET * 10**6):
            answer = await client.post(chat, content=content)
            found.append(answer.status_code)
        found.append((await client.post(generate, data={"text": SECRET, "chat": SECRET})).status_code)
        found.append((await client.post(generate, files={"files": (SECRET, SECRET.encode())})).status_code)
        found.append((await client.get(f"/v1/models?q={SECRET}")).status_code)
        found.append((await client.delete("/v1/requests/one")).status_code)
        async with client.stream("POST", chat, json=CHAT | {"stream": True, "max_tokens": 400}) as stream:
            found.append(stream.status_code)  # and leaves
        for wrong in (f"Bearer {SECRET}-wrong", f"Basic {SECRET}", ""):
            asked = await client.post(chat, json=CHAT, headers={"Authorization": wrong})
            found.append(asked.status_code)
    async with clients.service(running) as log:  # and what plain services publish
        for number, event in enumerate(
            (SECRET, f'{{"model": "{SECRET}"}}', f'{{"inputs": {{"text": "{SECRET}"}}')
        ):
            await log.publish(f"{running.prefix}.request.junk-{number}", event.encode())
        wrong_params = {"model": "demo", "inputs": {"text": SECRET}, "params": {"temperature": SECRET}}
        await log.publish(f"{running.prefix}.request.junk-9", json.dumps(wrong_params).encode())
        odd = {
            "model": "demo",
            "inputs": {"messages": [{"role": "user", "content": {"a": 2**70}, "b": SECRET}]},
        }
        await log.publish(f"{running.prefix}.request.junk-8", json.dumps(odd).encode())
    if conductor is not None:
        async with clients.log_of(running, conductor) as own:
            await own.publish(f"{running.prefix}.walk.junk", SECRET.encode())
    return found


def asked(folder: Path, *, as_program: bool, **told: str) -> tuple[list[int], Said]:
    """A deployment after all these requests and its stop; its responses and its output."""
    env = {"DALSEGNO_GATEWAY_API_KEYS": f"alice={KEY}", "DALSEGNO_GATEWAY_MAX_BODY_BYTES": "1000000", **told}
    with deploy.serve(folder, env=env, as_program=as_program) as running:
        roles = [*running.pids.conductor, *running.pids.gateway, *running.pids.worker.values()]
        of_roles = [running.shown_by(pid) for pid in roles] if as_program else []
        credentials = [running.client, running.reader, *of_roles]
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in running.all_pids()]
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in roles]
        statuses = asyncio.run(everything(running, of_roles[0] if as_program else None))
        assert running.stop() == 0
        files = {path.name: path.read_text() for path in running.data_dir.glob("logs/*.log*")}
        shown = [one.seed or one.password or "" for one in credentials]
        return statuses, Said(running.log(), files, shown, commands, environments)


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Said]:
    folder = tmp_path_factory.mktemp("default")
    return asked(folder, as_program=True, DALSEGNO_LOGS_LEVEL="debug", DALSEGNO_LOGS_FORMAT="json")


def test_all_of_it_was_asked(by_default: tuple[list[int], Said]) -> None:
    statuses, said = by_default

    assert {200, 400, 401, 404, 409, 413} <= set(statuses)
    assert 500 not in statuses
    assert {"gateway.log", "conductor.log", "worker-0.log"} <= set(said.files)


def test_neither_a_key_nor_a_prompt_is_in_any_log(by_default: tuple[list[int], Said]) -> None:
    _, said = by_default

    assert [line for line in said.all.splitlines() if SECRET in line] == []
    assert "is refused" in said.files["conductor.log"]
    assert QUOTATION not in said.all


def test_nothing_that_is_shown_to_nats_is_in_any_log(by_default: tuple[list[int], Said]) -> None:
    _, said = by_default

    assert len(said.shown) == 5
    assert all(len(secret) > 40 for secret in said.shown)
    assert [secret for secret in said.shown if secret in said.all] == []


def test_nobody_reads_a_secret_in_a_process_list(by_default: tuple[list[int], Said]) -> None:
    _, said = by_default

    assert len(set(said.shown)) == len(said.shown)
    assert not [secret for secret in said.shown for command in said.commands if secret in command]
    for secret, environment in zip(said.shown[2:], said.environments, strict=True):
        assert secret in environment
        assert not [other for other in said.shown if other != secret and other in environment]


def test_every_line_is_an_object(by_default: tuple[list[int], Said]) -> None:
    _, said = by_default
    welcome = [line for line in said.terminal.splitlines() if not line.startswith("{")]
    lines = [line for line in said.all.splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]

    assert "Dal Segno serves demo" in "\n".join(welcome)  # to stdout: it was asked for
    assert all("Traceback" not in line and "INFO" not in line for line in welcome)
    assert {"gateway", "conductor", "worker-0", "dalsegno"} <= {line["role"] for line in found}
    assert all({"time", "level", "role", "message"} <= set(line) for line in found)
    asked = [line for line in found if line.get("path") == "/v1/chat/completions"]
    assert {line["key"] for line in asked} == {"alice", None}
    assert {200, 400, 401, 413} <= {line["status"] for line in asked}


def test_prompts_are_there_where_the_operator_wants_them_and_keys_never(tmp_path: Path) -> None:
    _, said = asked(tmp_path, as_program=False, DALSEGNO_LOGS_PROMPTS="true")

    assert f"{SECRET}?" in said.files["gateway.log"]
    assert QUOTATION in said.files["conductor.log"]
    assert KEY not in said.all
    assert f"{SECRET}-wrong" not in said.all
