"""The whole gateway process, with a real socket and a real nats-server."""

import asyncio
import socket
import time
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
from gateway.requests import refusal_writer
from shared.errors import ClientError
from shared.events import RequestCancel, RequestsRefused, RequestSubmitted, WorkerJoined, decode, encode
from shared.log.nats import jetstream
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import authorization
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log
from shared.subject_rules import read_event
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
    nats: NatsServer, drain_s: float = 5.0, credentials: Credentials | None = None
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """`gateway.app.run`; gives its URL and its task."""
    config = msgspec.structs.replace(resolve("demo"), gateway=GatewaySettings(port=0, drain_s=drain_s))
    options = GatewayOptions(config=config, nats_url=nats.url, credentials=credentials or nats.credentials)
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


# ---- requests that are refused ---------------------------------------------------------------------------
BURST = 10_000
_CONNECTIONS = 5


async def flood(url: str, count: int) -> int:
    """Send `count` requests that are refused, one after the other on one connection; return their number."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /generate HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    refused = 0
    for _ in range(count):
        writer.write(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        refused += answer.startswith(b"HTTP/1.1 400")
    writer.close()
    return refused


async def refusals(log: Log) -> list[RequestsRefused]:
    async with aclosing(log.history([SUBJECTS.refused("*")])) as records:
        found = [read_event(record, SUBJECTS)[1] async for record in records]
    return [one for one in found if isinstance(one, RequestsRefused)]


async def test_a_burst_of_refusals_is_counted_exactly_in_a_few_events(nats: NatsServer) -> None:
    nats.start()
    try:
        async with stage(nats) as performing, gateway_process(nats) as (url, process):
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                await health(client, "log", "connected")
            started_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                floods = [tasks.create_task(flood(url, BURST // _CONNECTIONS)) for _ in range(_CONNECTIONS)]
            took_s = time.monotonic() - started_s
            process.cancel()
            await asyncio.wait({process})
            found = await refusals(performing.log)
    finally:
        nats.stop()

    assert sum(one.result() for one in floods) == BURST
    assert sum(count.count for event in found for count in event.counts) == BURST
    assert {count.code for event in found for count in event.counts} == {"missing_required_parameter"}
    assert 1 <= len(found) <= 2 + took_s / refusal_writer.INTERVAL_S  # the first, and the one at the end
    assert all(len(encode(event)) < 4096 for event in found)


async def asked_for_a_batch(client: httpx.AsyncClient) -> int:
    """Ask for a batch; return the status."""
    form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    file_id = (await client.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return (await client.post("/v1/batches", json=body)).status_code


async def test_a_stream_of_an_earlier_version_takes_requests_and_later_the_refusals(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is provisioned again it has no place for refusals; nothing else is disturbed."""
    monkeypatch.setattr(refusal_writer, "DELAY_S", 0.0)
    monkeypatch.setattr(refusal_writer, "INTERVAL_S", 0.1)
    monkeypatch.setattr(refusal_writer, "WRITE_S", 0.5)
    now = Subjects.logged
    nats.start()
    try:
        with monkeypatch.context() as earlier:
            earlier.setattr(
                Subjects,
                "logged",
                lambda self: [
                    one
                    for one in now(self)
                    if not one.startswith(("ds.refused.", "ds.batch.", "ds.conversation."))
                ],
            )
            await jetstream.provision(nats.url, nats.credentials, SUBJECTS)
        log = await jetstream.connect(nats.url, credentials=nats.credentials, subjects=SUBJECTS, name="x")
        joined = WorkerJoined(writer="w0", rank=0, model="decoder_lm", nodes=[], device="cpu")
        await log.publish(SUBJECTS.worker(0), encode(joined))
        async with gateway_process(nats) as (url, _), httpx.AsyncClient(base_url=url, timeout=20) as client:
            await health(client, "log", "connected")
            assert await flood(url, 3) == 3
            assert await refusals(log) == []
            assert await asked_for_a_batch(client) >= 500
            performing = Stage(log)
            for number in range(3):  # submissions go on while the refusals wait
                async with asyncio.TaskGroup() as tasks:
                    body = CHAT | {"request_id": f"r-{number}"}
                    asking = tasks.create_task(client.post("/v1/chat/completions", json=body))
                    async with aclosing(log.read([SUBJECTS.request(f"r-{number}")], 1)) as records:
                        record = await anext(records)
                    event = decode(record.data)
                    assert isinstance(event, RequestSubmitted)
                    answer = Performance(performing, SUBJECTS, event, record.seq)  # type: ignore[arg-type]
                    answer.say("answered")
                    answer.finish()
                assert asking.result().status_code == 200
            await jetstream.provision(nats.url, nats.credentials, SUBJECTS)
            while await asked_for_a_batch(client) != 200:  # noqa: ASYNC110 - its connection is made again
                await asyncio.sleep(0.05)
            counted = 0
            async with aclosing(log.read([SUBJECTS.refused("*")], 1)) as records:
                while counted < 4:  # with the batch
                    event = decode((await anext(records)).data)
                    assert isinstance(event, RequestsRefused)
                    counted += sum(one.count for one in event.counts)
        await log.close()
    finally:
        nats.stop()

    assert counted == 4


async def test_without_the_permission_requests_are_served_and_the_operator_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the nats-server.conf of an earlier version a client must not be able to end the gateway."""
    monkeypatch.setattr(refusal_writer, "DELAY_S", 0.0)
    monkeypatch.setattr(refusal_writer, "INTERVAL_S", 0.1)
    roles = {name: Credentials(user=name, password=name) for name in ("provisioner", "gateway", "worker-0")}
    earlier = authorization(roles, SUBJECTS)
    for subject in ("ds.refused.*", "ds.batch.*", "ds.beat.batch.*", "ds.conversation.*"):
        earlier = earlier.replace(f', "{subject}"', "")
    nats = NatsServer(tmp_path, port=free_port(), authorization=earlier)
    nats.start()
    try:
        await jetstream.provision(nats.url, roles["provisioner"], SUBJECTS)
        worker = await jetstream.connect(
            nats.url, credentials=roles["worker-0"], subjects=SUBJECTS, name="worker-0"
        )
        joined = WorkerJoined(writer="w0", rank=0, model="decoder_lm", nodes=[], device="cpu")
        await worker.publish(SUBJECTS.worker(0), encode(joined))
        async with (
            gateway_process(nats, credentials=roles["gateway"]) as (url, process),
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            await health(client, "log", "connected")
            assert await flood(url, 3) == 3
            while "refused requests cannot be recorded now" not in caplog.text:  # noqa: ASYNC110 - a log line
                await asyncio.sleep(0.01)
            assert (await client.post("/v1/conversations", json={})).status_code >= 500
            assert await asked_for_a_batch(client) >= 500
            state = await health(client, "log", "connected")
            assert not process.done()
        await worker.close()
    finally:
        nats.stop()

    assert state["log"]["connected"]
    assert "ds.refused.g-" in caplog.text
