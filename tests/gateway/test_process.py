"""The whole gateway process, with a real socket and a real nats-server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from configs.checks import resolve
from configs.deployment import GatewaySettings
from gateway.app import GatewayOptions, run
from gateway.http import server
from shared.errors import ClientError
from shared.events import RequestCancel, RequestSubmitted, WorkerJoined, decode, encode
from shared.log.nats import jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log
from shared.subjects import Subjects
from tests.gateway.world import CHAT, Performance

pytestmark = pytest.mark.processes


SUBJECTS = Subjects()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateway_process(
    nats: NatsServer, drain_s: float = 5.0
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """`gateway.app.run`; gives its URL and its task."""
    config = msgspec.structs.replace(resolve("demo"), gateway=GatewaySettings(port=0, drain_s=drain_s))
    options = GatewayOptions(config=config, nats_url=nats.url, credentials=nats.credentials)
    async with asyncio.TaskGroup() as tasks:
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        process = tasks.create_task(run(options, listening=url.set_result))
        yield await url, process
        process.cancel()


async def health(client: httpx.AsyncClient, part: str, what: str) -> dict[str, Any]:
    """`/health`, once the condition holds."""
    while not (state := (await client.get("/health")).json())[part][what]:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)
    return cast("dict[str, Any]", state)


class Stage:
    """Answers requests on a real log: a `Performance` appends to it."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def append(self, subject: str, data: bytes) -> None:
        self.log.post(subject, data)

    async def next_performance(self) -> Performance:
        async with aclosing(self.log.read([SUBJECTS.request("*")], 1)) as records:
            record = await anext(records)
            event = decode(record.data)
            assert isinstance(event, RequestSubmitted)
            return Performance(self, SUBJECTS, event, record.seq)  # type: ignore[arg-type] # it appends


@asynccontextmanager
async def stage(nats: NatsServer) -> AsyncIterator[Stage]:
    """A stream with a worker that joined."""
    await jetstream.provision(nats.url, nats.credentials, SUBJECTS)
    log = await jetstream.connect(nats.url, credentials=nats.credentials, subjects=SUBJECTS, name="stage")
    try:
        joined = WorkerJoined(writer="w0", rank=0, model="decoder_lm", nodes=[], device="cpu")
        await log.publish(SUBJECTS.worker(0), encode(joined))
        yield Stage(log)
    finally:
        await log.close()


@pytest.fixture
def nats(tmp_path: Path) -> NatsServer:
    return NatsServer(tmp_path, port=free_port())


async def test_it_is_live_before_nats_and_serves_once_nats_is_there(nats: NatsServer) -> None:
    async with gateway_process(nats) as (url, _), httpx.AsyncClient(base_url=url, timeout=20) as client:
        live = await client.get("/health/live")
        early = await client.post("/v1/chat/completions", json=CHAT)
        nats.start()
        try:
            async with stage(nats) as performing, asyncio.TaskGroup() as tasks:
                await health(client, "log", "connected")
                asking = tasks.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
                performance = await performing.next_performance()
                performance.say("a sequence")
                performance.say(" has a length")
                performance.finish()
        finally:
            nats.stop()

    assert live.status_code == 200
    assert early.status_code == 503
    assert "retry-after" in early.headers
    text = asking.result().text
    assert '"content":"a sequence"' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_told_to_stop_it_ends_its_streams_and_takes_nothing_new(nats: NatsServer) -> None:
    nats.start()
    try:
        async with stage(nats) as performing, gateway_process(nats) as (url, process):
            limits = httpx.Limits(max_keepalive_connections=4)
            async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
                await health(client, "log", "connected")
                async with asyncio.TaskGroup() as tasks:
                    asking = tasks.create_task(client.post("/v1/chat/completions", json=CHAT))
                    performance = await performing.next_performance()
                    process.cancel()
                    state = await health(client, "gateway", "draining")
                    refused = await client.post("/v1/chat/completions", json=CHAT)
                    performance.say("to the end")
                    performance.finish()
                await asyncio.wait({process})
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health/live")
    finally:
        nats.stop()

    assert state["status"] != "ready"
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert asking.result().json()["choices"][0]["message"]["content"] == "to the end"


async def test_past_the_deadline_streams_end_with_an_error_and_are_not_cancelled(nats: NatsServer) -> None:
    nats.start()
    try:
        async with stage(nats) as performing, gateway_process(nats, drain_s=0.05) as (url, process):
            async with httpx.AsyncClient(base_url=url, timeout=20) as client, asyncio.TaskGroup() as tasks:
                await health(client, "log", "connected")
                asking = tasks.create_task(client.post("/generate", json={"text": "x"}))
                (await performing.next_performance()).say("begun")
                process.cancel()
            await asyncio.wait({process})
            async with aclosing(performing.log.history([SUBJECTS.control("*")])) as records:
                cancels = [decode(record.data) async for record in records]
    finally:
        nats.stop()

    assert '"modality":"error"' in asking.result().text.splitlines()[-1]
    assert not any(isinstance(event, RequestCancel) for event in cancels)


def test_a_port_that_is_taken_is_one_clear_line_and_may_be_free_later() -> None:
    taken = server.bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    try:
        said = f"cannot listen on 127.0.0.1:{port}: .*choose another"
        with pytest.raises(server.PortTakenError, match=said) as raised:
            server.bind("127.0.0.1", port)
    finally:
        taken.close()
    assert not isinstance(raised.value, ClientError)  # a `ClientError` would be status 78: do not restart
    server.bind("127.0.0.1", port).close()


def test_a_host_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(server.ListenError, match=r"cannot listen on no\.such\.host\.invalid"):
        server.bind("no.such.host.invalid", 0)
    with pytest.raises(server.ListenError, match=r"cannot listen on 192\.0\.2\.1:0: .*choose another"):
        server.bind("192.0.2.1", 0)
