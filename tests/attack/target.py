"""Deployments under attack: served as a user serves, with a tiny checkpoint of random weights."""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from shared.log.nats.credentials import Credentials
from shared.log.nats.private_server import nats_server_binary
from tests.attack import bus
from tests.attack.bus import Bus
from tests.chaos.rawlog import RawLog, Record
from tests.e2e import deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

MODEL: Final = "attacked"
ANSWER_S: Final = 90.0
"""Time limit of a request on a busy machine; then it counts as unanswered."""


@contextmanager
def served(
    folder: Path,
    *,
    ranks: int = 1,
    keys: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Running]:
    """A ready deployment; with `keys`, the names of its API keys (each key is its name and `-key`)."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model": "decoder_lm",
        "name": MODEL,
        "checkpoint": str(tiny_checkpoint("qwen3")),
        "max_seq_len": 512,
        "node_groups": [{"node_names": ["prepare", "llm"], "ranks": list(range(ranks))}],
        **(settings or {}),
    }
    if keys:
        config["gateway"] = {**config.get("gateway", {}), "api_keys": [f"{name}={name}-key" for name in keys]}
    file = folder / f"{MODEL}.yaml"
    file.write_text(yaml.safe_dump(config))
    with deploy.serve(folder, model=str(file), env=env) as running:
        yield running


@asynccontextmanager
async def client(running: Running, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the deployment, with the key of this name."""
    headers = {"authorization": f"Bearer {key}-key"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=running.url, timeout=ANSWER_S, limits=limits, headers=headers
    ) as http:
        yield http


def chat(text: str, **params: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **params}


# ---- with a NATS server of its own, and a key for every role -------------------------------------------


@dataclass(frozen=True, slots=True)
class Guarded:
    """A deployment on a NATS server that `dalsegno init-security` configured."""

    running: Running
    url: str
    folder: Path

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def credentials(self, role: str) -> Credentials:
        return Credentials(seed=(self.folder / "keys" / f"{role}.nk").read_text().strip())

    @asynccontextmanager
    async def bus(self, role: str) -> AsyncIterator[Bus]:
        """A connection with a role's key."""
        async with bus.connected(self.url, role, self.credentials(role), self.ca_file) as found:
            yield found

    async def records(self, start_seq: int = 1) -> list[Record]:
        """The records of the log from a position on, read with the reader's key."""
        async with self.bus("reader") as reader:
            return await RawLog(reader).records(start_seq)

    async def last_seq(self) -> int:
        async with self.bus("reader") as reader:
            return await RawLog(reader).last_seq()

    def command(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run `dalsegno ARGS` as an operator of this server would."""
        command = [sys.executable, "-m", "dalsegno", *args]
        state = {"XDG_STATE_HOME": str(self.folder.parent / "state")}
        env = {**os.environ, **_environment(self.url, self.folder), **state}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=ANSWER_S, check=False)


@contextmanager
def guarded(folder: Path, *, ranks: int, keys: int) -> Iterator[Guarded]:
    """A deployment of `ranks`, on a server that knows the keys of `keys` workers."""
    security, port = folder / "security", _free_port()
    url = f"tls://localhost:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    init = [sys.executable, "-m", "dalsegno", "init-security", str(security), "--ranks", str(keys)]
    subprocess.run([*init, "--client", "billing"], check=True, capture_output=True)
    command = [str(nats_server_binary()), "--config", str(security / "nats-server.conf"), "--port", str(port)]
    with (folder / "nats.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait_for(port)
            env = {**_environment(url, security), "XDG_STATE_HOME": str(folder / "state")}
            with served(folder, ranks=ranks, env=env) as running:
                yield Guarded(running, url, security)
        finally:
            server.terminate()


def _environment(url: str, security: Path) -> dict[str, str]:
    return {
        "DALSEGNO_NATS_URL": url,
        "DALSEGNO_NATS_CA_FILE": str(security / "ca.pem"),
        "DALSEGNO_NATS_CREDENTIALS_FILE": str(security / "keys"),
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")


# ---- one request ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Told:
    """Everything that a client of `/generate` was told: lines, and the end."""

    request_id: str
    lines: list[dict[str, Any]]
    is_under_way: asyncio.Event

    @classmethod
    def new(cls, name: str) -> "Told":
        return cls(f"{name}-{secrets.token_hex(4)}", [], asyncio.Event())

    @property
    def answer(self) -> tuple[bytes, tuple[int, ...], Any]:
        """The parts of an answer that a client can compare: the bytes, the tokens, the end."""
        data = b"".join(b64decode(line["data"]) for line in self.lines)
        tokens = (token for line in self.lines for token in line["metadata"].get("token_ids", []))
        last = self.lines[-1]["metadata"] if self.lines else {}
        return data, tuple(tokens), last.get("finish_reason") or last.get("code") or "no end"


async def generate(http: httpx.AsyncClient, told: Told, text: str, after: int = 4, **params: Any) -> Told:
    """Stream a whole answer; `told.is_under_way` is set after so many lines."""
    body = {"text": text, "request_id": told.request_id, "model_kwargs": {"temperature": 0, **params}}
    async with http.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            told.lines.append({"data": "", "metadata": error})
        else:
            async for line in response.aiter_lines():
                told.lines.append(json.loads(line))
                if len(told.lines) >= after:
                    told.is_under_way.set()
    told.is_under_way.set()
    return told


def replayed(running: Running) -> list[dict[str, Any]]:
    """The verdicts of `dalsegno replay --all` on a deployment."""
    command = [
        sys.executable,
        "-m",
        "dalsegno",
        "replay",
        "--all",
        "--json",
        "--data-dir",
        str(running.data_dir),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert ended.stdout, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
