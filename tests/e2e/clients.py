"""Client helpers of end-to-end tests: HTTP requests, NATS events, log reading, the command line."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import httpx
import msgspec
import nats
import nats.js.client

from dalsegno.config import environment
from shared.events import AnyEvent, Event, MalformedEventError, OutputChunk, OutputFence, decode
from shared.log.nats import jetstream
from shared.log.nats.credentials import Credentials
from shared.log.port import Log
from shared.subjects import Subjects
from shared.transcript import Transcript
from tests import forked
from tests.e2e.deploy import Running

E = TypeVar("E", bound=Event)
Ended: TypeAlias = "subprocess.CompletedProcess[str]"
ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 60.0
JUNK: Final = (b"", b"\xc1", b"{", msgspec.msgpack.encode({"reason": 5}), b"\x91" * 100_000)
"""Messages that are no events."""


# ---- over HTTP ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """One answer of `/generate`, chunk by chunk.

    Attributes:
        awaited_tokens: the number of tokens after which `under_way` is set.
        arrivals_s: the arrival time of each chunk.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)
    awaited_tokens: int = 1
    under_way: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def told(self) -> tuple[str, list[int], dict[str, Any]]:
        """Everything that a client can compare with another answer."""
        return self.text, self.token_ids, self.end

    @property
    def longest_stall_s(self) -> float:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    def take(self, line: dict[str, Any]) -> None:
        assert line["modality"] == "text", line
        self.arrivals_s.append(time.monotonic())
        self.text += base64.b64decode(line["data"]).decode()
        metadata = line["metadata"]
        if "finish_reason" in metadata:
            self.end = metadata
            return
        self.indices.append(metadata["index"])
        self.token_ids += metadata["token_ids"]
        if len(self.token_ids) >= self.awaited_tokens:
            self.under_way.set()


@asynccontextmanager
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient, None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, limits=limits) as client:
        yield client


def body(text: str, request_id: str, **params: Any) -> dict[str, Any]:
    return {"text": text, "request_id": request_id, "model_kwargs": params}


async def generate(client: httpx.AsyncClient, answer: Answer, text: str, **params: Any) -> Answer:
    """Stream the whole answer to `text`."""
    async with client.stream("POST", "/generate", json=body(text, answer.request_id, **params)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            answer.take(json.loads(line))
    return answer


async def answers(
    client: httpx.AsyncClient, texts: list[str], prefix: str, *, at_once: int, **params: Any
) -> list[Answer]:
    """The answers to many requests, with a limit of concurrent ones."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int, text: str) -> Answer:
        async with places:
            return await generate(client, Answer(f"{prefix}-{number}"), text, **params)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(number, text)) for number, text in enumerate(texts)]
    return [task.result() for task in asked]


async def wait_until_ready(running: Running) -> None:
    deadline = time.monotonic() + PATIENCE_S
    async with http(running) as client:
        while True:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, running.log()
            await asyncio.sleep(0.05)  # health is asked, it does not tell


# ---- over NATS, as any service does: the stock client, and nothing of ours -----------------------------


@asynccontextmanager
async def service(running: Running) -> AsyncGenerator[nats.js.client.JetStreamContext, None]:
    client = await nats.connect(running.nats_url, **running.now.nats_client)
    try:
        yield client.jetstream()
    finally:
        await client.close()


# ---- the log -------------------------------------------------------------------------------------------


@asynccontextmanager
async def log_of(running: Running, shown: Credentials) -> AsyncGenerator[Log, None]:
    """The log, for any client with credentials."""
    log = await jetstream.connect(
        running.nats_url, credentials=shown, subjects=Subjects(running.prefix), name="an e2e test"
    )
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def reader(running: Running) -> AsyncGenerator["Reader", None]:
    async with log_of(running, running.reader) as log:
        yield Reader(log, Subjects(running.prefix))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads a deployment's log."""

    log: Log
    subjects: Subjects

    async def until(
        self, subject: str, kind: type[E], which: Callable[[E], bool] = lambda _: True
    ) -> tuple[int, E]:
        """Wait for the first such event on a subject; return it with its sequence."""
        async with asyncio.timeout(PATIENCE_S), aclosing(self.log.read([subject], 1)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, kind) and which(event):
                    return record.seq, event
        raise AssertionError("the log ended")

    async def events(self, request_id: str) -> list[AnyEvent]:
        """All readable events of a request in the log."""
        found: list[AnyEvent] = []
        async with aclosing(self.log.history(self.subjects.all_of(request_id))) as records:
            async for record in records:
                address = self.subjects.parse(record.subject)
                try:
                    found.append(decode(record.data, address.kind if address else None))
                except MalformedEventError:
                    continue
        return found

    async def answer(self, request_id: str) -> tuple[str, list[int]]:
        """Text and tokens of a request's output, from the log."""
        transcript, chunks = Transcript(), list[OutputChunk]()
        for event in await self.events(request_id):
            if isinstance(event, OutputChunk | OutputFence):
                chunks += transcript.fold(event)
        return "".join(chunk.text for chunk in chunks), [id for chunk in chunks for id in chunk.token_ids]

    async def said(self, subject: str, which: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first such heartbeat from now on."""
        async with asyncio.timeout(PATIENCE_S), aclosing(self.log.listen(subject)) as beats:
            async for _, data in beats:
                beat: dict[str, Any] = msgspec.msgpack.decode(data)
                if which(beat):
                    return beat
        raise AssertionError("no beats any more")


async def attempts_of(running: Running, request_ids: Sequence[str]) -> set[int]:
    """The attempts that wrote any of these answers: more than one, if a kill came in the middle."""
    async with reader(running) as log:
        found = [event for request_id in request_ids for event in await log.events(request_id)]
    return {event.attempt for event in found if isinstance(event, OutputChunk)}


# ---- the command line ------------------------------------------------------------------------------------


def run(
    *args: str, env: dict[str, str] | None = None, cwd: Path | None = None, as_program: bool = False
) -> Ended:
    """Run `dalsegno ARGS`, with any exit status: forked (`tests.forked`), or as a new program."""
    around = {**os.environ, **(env or {})}
    if not as_program:
        return forked.run(*args, env=around, cwd=cwd, timeout_s=PATIENCE_S)
    return subprocess.run(
        [sys.executable, "-m", "dalsegno", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=around,
        cwd=cwd,
    )


def run_on(running: Running, *args: str, env: dict[str, str] | None = None) -> Ended:
    """Run `dalsegno ARGS` on the log of a running deployment."""
    told = environment.of(running.client) | (env or {})
    return run(*args, "--nats", running.nats_url, "--prefix", running.prefix, env=told)


def verdicts(ended: Ended) -> dict[str, dict[str, Any]]:
    """The verdicts of `dalsegno replay --json`, by request."""
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return {verdict["request_id"]: verdict for verdict in found}


def example(name: str) -> Path:
    return ROOT / "docs" / "examples" / name
