"""Two gateways: the serving one is killed in the middle, and the other continues byte by byte.

Bytes are compared with a later reading of the whole answer from the log: how tokens are grouped into chunks
depends on the worker's timing, and differs between runs. Text is compared with another run.
"""

import asyncio
import base64
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from dalsegno import AsyncClient, Credentials
from dalsegno.config import environment
from shared import faults
from shared.events import (
    DeadlinePassed,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    RequestWatched,
)
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

TOKENS: Final = 160
LONG: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
TEXT: Final = "Tell me a long story about wizards."
MESSAGES: Final = [{"role": "user", "content": TEXT}]
STREAMED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "lines": ("/generate", {"text": TEXT, "model_kwargs": LONG}),
    "scored-lines": ("/generate", {"text": TEXT, "model_kwargs": LONG | {"logprobs": 2, "echo": True}}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, **LONG}),
    "counted-chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **LONG},
    ),
    "scored-chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 1, **LONG},
    ),
    "completion": ("/v1/completions", {"prompt": TEXT, "stream": True, "logprobs": 1, **LONG}),
    "two-chats": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "n": 2, **LONG, "seed": 3}),
    "two-completions": ("/v1/completions", {"prompt": [TEXT, "x"], "stream": True, **LONG}),
}
DOCUMENTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "document": ("/generate", {"text": TEXT, "model_kwargs": LONG, "streaming": False}),
    "chat-document": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, **LONG}),
}
SEVERAL: Final = frozenset({"two-chats", "two-completions"})


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A role's fault file (`shared.faults`)."""
    return tmp_path_factory.mktemp("orders") / "order"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, orders: Path) -> Iterator[Running]:
    """One deployment for all kills; killed roles are restarted for the next."""
    flags = ("--set", "recovery.gateways=2", "--set", "name=tiny")
    with deploy.serve(
        tmp_path_factory.mktemp("gateways"),
        *flags,
        model=str(tiny_checkpoint("qwen3")),
        env={environment.FAULT: str(orders)},
    ) as running:
        yield running


def kill_at_chunk(orders: Path, number: int) -> None:
    """Kill the gateway that first has relayed so many chunks."""
    orders.write_text(faults.order("gateway.chunk.relayed", number, "kill"))


@contextmanager
def held_up(orders: Path) -> Iterator[None]:
    """Within the block, the worker waits in the middle of an answer."""
    orders.write_text(faults.order("worker.token.computed", TOKENS // 3, "wait"))
    try:
        yield
    finally:
        orders.write_text("")


@dataclass(slots=True)
class Stream:
    """One stream, as its client received it."""

    path: str
    body: dict[str, Any]
    raw: bytes = b""
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_lines(self) -> bool:
        return self.path == "/generate"

    @property
    def pieces(self) -> list[bytes]:
        """The complete lines or events."""
        end = b"\n" if self.is_lines else b"\n\n"
        return [piece + end for piece in self.raw.split(end)[:-1]]

    @property
    def position(self) -> dict[str, str]:
        """The position to resume after, as a header."""
        if not self.pieces:
            return {}
        last = self.pieces[-1]
        if self.is_lines:
            return {"last-event-id": str(json.loads(last)["metadata"]["index"])}
        return {"last-event-id": last.partition(b"\n")[0].removeprefix(b"id: ").decode()}

    async def read(self, client: httpx.AsyncClient, url: str, **options: Any) -> None:
        async with client.stream("POST", f"{url}{self.path}", json=self.body, **options) as response:
            assert response.status_code == 200, await response.aread()
            async for piece in response.aiter_raw():
                self.raw += piece
                self.begun.set()


def said(path: str, pieces: list[bytes]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for piece in pieces:
        if path == "/generate":
            line = json.loads(piece)
            texts[0] = texts.get(0, "") + base64.b64decode(line["data"]).decode()
            continue
        data = piece.partition(b"data: ")[2].strip()
        for choice in [] if data == b"[DONE]" else json.loads(data)["choices"]:
            told = choice.get("text", choice.get("delta", {}).get("content")) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + told
    return texts


def http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=clients.PATIENCE_S, limits=httpx.Limits(max_connections=None))


def asked(name: str, request_id: str) -> Stream:
    path, body = (STREAMED | DOCUMENTS)[name]
    model = {} if path == "/generate" else {"model": "tiny"}
    return Stream(path, {**body, **model, "request_id": request_id})


async def is_back(client: httpx.AsyncClient, url: str) -> None:
    deadline = time.monotonic() + clients.PATIENCE_S
    while True:
        with suppress(httpx.HTTPError):
            if (await client.get(f"{url}/health/ready")).status_code == 200:
                return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)  # health is asked, it does not tell


async def test_what_a_client_had_and_what_it_gets_at_the_other_gateway_is_the_whole_to_the_byte(
    running: Running, orders: Path
) -> None:
    kill_at_chunk(orders, 5 * len(STREAMED))
    url, other = running.now.urls
    streams = {name: asked(name, f"killed-{name}") for name in STREAMED}
    documents = {name: asked(name, f"killed-{name}") for name in DOCUMENTS}

    async with http() as client:

        async def broken(stream: Stream) -> None:
            with pytest.raises(httpx.HTTPError):
                await stream.read(client, url)

        async with asyncio.TaskGroup() as tasks:
            for stream in (*streams.values(), *documents.values()):
                tasks.create_task(broken(stream))
        had = {name: stream.pieces for name, stream in streams.items()}

        async with asyncio.TaskGroup() as tasks:
            rests = {name: Stream(stream.path, stream.body) for name, stream in streams.items()}
            for name, rest in rests.items():
                tasks.create_task(rest.read(client, other, headers=streams[name].position))
            again = {name: Stream(one.path, one.body) for name, one in documents.items()}
            for one in again.values():
                tasks.create_task(one.read(client, other))
        await is_back(client, url)
        wholes = {name: Stream(one.path, one.body) for name, one in (streams | documents).items()}
        undisturbed = {name: asked(name, f"undisturbed-{name}") for name in STREAMED}
        async with asyncio.TaskGroup() as tasks:
            for one in (*wholes.values(), *undisturbed.values()):
                tasks.create_task(one.read(client, url))  # at the gateway that came back

    for name, stream in streams.items():
        whole, joined = wholes[name], [*had[name], *rests[name].pieces]
        assert len(had[name]) < len(whole.pieces)
        if name in SEVERAL:
            assert said(stream.path, joined) == said(stream.path, whole.pieces)
            assert len(joined) == len(whole.pieces)
        else:
            assert b"".join(joined) == whole.raw
        assert said(stream.path, joined) == said(stream.path, undisturbed[name].pieces)
        assert rests[name].raw.endswith(b"\n" if stream.is_lines else b"data: [DONE]\n\n")
    assert sum(map(bool, had.values())) > len(STREAMED) // 2
    for name, one in again.items():
        assert one.raw == wholes[name].raw
    async with clients.reader(running) as reader:
        for stream in streams.values():
            events = await reader.events(stream.body["request_id"])
            assert sum(isinstance(event, RequestFinished) for event in events) == 1
            assert not any(isinstance(event, RequestCancel) for event in events)


async def test_the_last_client_to_leave_cancels_and_no_gateway_that_lost_its_own(
    running: Running, orders: Path
) -> None:
    url, other = running.now.urls
    stream, moved = asked("lines", "moved"), asked("lines", "moved")
    async with (
        clients.reader(running) as reader,
        http() as here,
        http() as there,
        asyncio.TaskGroup() as tasks,
    ):
        with held_up(orders):
            control = reader.subjects.control("moved")
            reading = tasks.create_task(stream.read(here, url))
            await stream.begun.wait()
            going_on = tasks.create_task(moved.read(there, other))  # as if the network had failed unnoticed
            await moved.begun.wait()
            _, second = await reader.until(control, RequestWatched)
            _, first = await reader.until(control, RequestWatched, lambda said: said.writer != second.writer)
            reading.cancel()
            await reader.until(
                control, RequestWatched, lambda said: said.is_over and said.writer == first.writer
            )
            assert not any(isinstance(event, RequestCancel) for event in await reader.events("moved"))
            going_on.cancel()
            await reader.until(reader.subjects.walk("moved"), RequestCancelled)


async def test_a_client_of_ours_that_knows_both_does_not_see_the_one_die(
    running: Running, orders: Path
) -> None:
    urls = running.now.urls
    async with http() as client:
        await is_back(client, urls[0])
    async with AsyncClient(urls) as asking:
        undisturbed = await asking.generate(TEXT, **LONG)
        kill_at_chunk(orders, 5)
        stream = asking.stream(TEXT, **LONG)
        indices = [chunk.index async for chunk in stream]
        stood = await asking.health()

    assert indices == list(range(len(indices)))
    assert (stream.answer.text, stream.answer.usage) == (undisturbed.text, undisturbed.usage)
    assert stream.resumed == 1  # at once, at the other
    assert stood.is_ready


async def test_a_time_limit_is_kept_by_the_log_whichever_gateway_relays(
    running: Running, orders: Path
) -> None:
    url, other = running.now.urls
    body = asked("lines", "late").body | {"timeout_s": 0.5}
    async with http() as client, asyncio.TaskGroup() as tasks:
        await is_back(client, url)
        with held_up(orders):
            first = tasks.create_task(client.post(f"{url}/generate", json=body))
            second = tasks.create_task(client.post(f"{other}/generate", json=body | {"streaming": False}))
            await asyncio.wait({first, second})
        again = await client.post(f"{other}/generate", json=body | {"streaming": False})
    async with clients.reader(running) as reader:
        events = await reader.events("late")

    last = json.loads(first.result().text.splitlines()[-1])
    assert (last["modality"], last["metadata"]["code"]) == ("error", "deadline_exceeded")
    for response in (second.result(), again):
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
    assert any(isinstance(event, DeadlinePassed) for event in events)
    [failed] = [event for event in events if isinstance(event, RequestFailed)]
    assert failed.failure.status == 504


READS: Final = """
import json, sys
from pathlib import Path
from dalsegno import Client, Credentials
ready = json.loads(Path(sys.argv[1]).read_text())
shown = Credentials(**ready["nats_client"])
with Client(ready["nats_url"], credentials=shown, prefix=ready["prefix"]) as client:
    for chunk in client.stream(sys.argv[2], request_id="served", **json.loads(sys.argv[3])):
        print(json.dumps([chunk.index, chunk.text]), flush=True)
"""
"""A service that asks over NATS."""


async def test_a_service_over_nats_that_is_killed_reads_on_from_where_it_was(
    running: Running, orders: Path
) -> None:
    told = (sys.executable, "-c", READS, str(running.ready_file), TEXT, json.dumps(LONG))
    with held_up(orders):
        service = await asyncio.create_subprocess_exec(*told, stdout=asyncio.subprocess.PIPE)
        assert service.stdout is not None
        had = [json.loads(await service.stdout.readline()) for _ in range(2)]
        service.kill()
        await service.wait()
    shown = running.now
    async with AsyncClient(
        shown.nats_url, credentials=Credentials(**shown.nats_client), prefix=shown.prefix
    ) as client:
        undisturbed = await client.generate(TEXT, **LONG)
        rest = client.resume("served", TEXT, after=had[-1][0], **LONG)
        came = [(chunk.index, chunk.text) async for chunk in rest]

    assert [index for index, _ in (*had, *came)] == list(range(len(had) + len(came)))
    assert "".join(text for _, text in (*had, *came)) == undisturbed.text
    assert rest.answer.usage == undisturbed.usage
    async with clients.reader(running) as reader:
        events = await reader.events("served")
    assert sum(isinstance(event, RequestSubmitted) for event in events) == 1
    assert not any(isinstance(event, RequestCancel) for event in events)
