import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from configs.deployment import GatewaySettings
from gateway.requests import response as answer
from gateway.requests import submission
from gateway.requests.relay import BUFFER_BYTES
from shared.events import Inputs, RequestCancel, RequestSubmitted, encode
from tests.gateway.world import CHAT, Performance, World, deployment, echo, listening

pytestmark = pytest.mark.processes


async def wait_for_cancel(performance: Performance) -> None:
    """Send one chunk, then wait for a cancel."""
    if performance.event.inputs.text != "silent":
        performance.say("begun ")
    await performance.cancelled.wait()


@asynccontextmanager
async def raw(url: str, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A socket on which one request was sent; closing it disconnects the client."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)  # small kernel buffer
    connection.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=64 * 1024)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


async def cancelled(world: World, number: int = 0) -> RequestCancel:
    await (await world.performance(number)).cancelled.wait()
    event = world.events("control")[-1]
    assert isinstance(event, RequestCancel)
    return event


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"model": "demo", "prompt": "x", "stream": True}),
        ("/generate", {"text": "x"}),
    ],
)
async def test_a_client_that_leaves_in_the_middle_cancels(path: str, body: dict[str, Any]) -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, path, body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        event = await cancelled(world)

    performance = await world.performance()
    assert event.request_id == performance.request_id
    assert (event.writer, event.number) == ("g-test", 2)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_before_the_first_token_cancels(streaming: bool) -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", {"text": "silent", "streaming": streaming}):
            await world.performance()
        event = await cancelled(world)

    assert event.reason == "the client disconnected"


async def test_a_client_that_comes_back_in_time_finds_its_request_going_on() -> None:
    body = {"text": "x", "request_id": "r-1", "linger_s": 600}

    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        await world.until(lambda: not world.gateway.in_flight.count)
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b'"modality"')
            assert not world.events("control")


async def test_a_client_that_does_not_come_back_cancels_when_its_time_is_over() -> None:
    body = {"text": "x", "request_id": "r-1", "linger_s": 0.05}

    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        event = await cancelled(world)

    assert event.reason == "the client disconnected"


async def test_a_limit_that_is_over_does_not_wait_for_a_client_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "LIMIT_GRACE_S", 0)
    body = {"text": "x", "request_id": "r-1", "linger_s": 600, "timeout_s": 0.05}

    async with deployment(wait_for_cancel, keeps_limits=False) as world, listening(world) as url:
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b"deadline_exceeded")
        event = await cancelled(world)

    assert "took longer" in event.reason


async def test_a_client_that_may_come_back_is_waited_for_whoever_leaves_after_it() -> None:
    body = {"text": "x", "request_id": "r-1"}

    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", body) as plain:
            async with raw(url, "/generate", body | {"linger_s": 600}) as coming_back:
                await plain.readuntil(b'"modality"')
                await coming_back.readuntil(b'"modality"')
            await world.until(lambda: world.gateway.in_flight.count == 1)
        await world.until(lambda: not world.gateway.in_flight.count)
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b'"modality"')
            assert not world.events("control")
        await cancelled(world)  # the grace is over


async def test_a_request_that_waits_for_its_client_is_cancelled_in_time_also_if_others_want_its_id() -> None:
    body = {"text": "x", "request_id": "r-1", "linger_s": 0.3}

    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        await world.until(lambda: not world.gateway.in_flight.count)
        conflict = await world.client.post("/generate", json=body | {"text": "another"})
        assert not world.events("control")
        event = await cancelled(world)

    assert conflict.status_code == 409
    assert event.reason == "the client disconnected"


async def test_of_requests_that_wait_for_their_clients_so_many_go_on_as_may_be_asked_at_a_time() -> None:
    settings = GatewaySettings(max_in_flight=2)
    asked = {"model": "demo", "prompt": "x", "stream": True, "linger_s": 600, "n": 2}

    async with deployment(wait_for_cancel, settings=settings) as world, listening(world) as url:
        for name in "abc":
            async with raw(url, "/v1/completions", asked | {"request_id": name}) as reader:
                await reader.readuntil(b"data: ")
                await world.performance({"a": 1, "b": 3, "c": 5}[name])
            await world.until(lambda: not world.gateway.in_flight.count)
        await world.until(lambda: len(world.events("control")) == 2)
        await (await world.performance(1)).cancelled.wait()

    assert {event.request_id for event in world.events("control")} == {"a", "a-1"}


@pytest.mark.parametrize("wrong", [-1, 601, "soon"])
async def test_a_time_to_come_back_that_is_none_is_refused(wrong: object) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", json={"text": "x", "linger_s": wrong})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "linger_s")


async def test_a_client_that_leaves_before_the_ack_cancels_once_it_is_stored() -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        world.server.stall()
        async with raw(url, "/generate", {"text": "silent"}):
            await world.until(lambda: world.gateway.in_flight.count == 1)
            await asyncio.sleep(0)
        await world.until(lambda: not world.gateway.in_flight.count)
        world.server.unstall()
        await cancelled(world)

    assert [type(event).__name__ for event in world.events("request", "control")] == [
        "RequestSubmitted",
        "RequestCancel",
    ]


@pytest.mark.parametrize(("request_id", "cancels"), [(None, True), ("chosen", False)])
async def test_what_was_not_acked_in_time_is_given_up_unless_it_can_be_asked_for_again(
    request_id: str | None, cancels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "ACCEPT_S", 0.01)
    async with deployment(wait_for_cancel) as world:
        world.server.stall()
        response = await world.client.post("/generate", json={"text": "silent", "request_id": request_id})
        world.server.unstall()
        performance = await world.performance()
        if cancels:
            await performance.cancelled.wait()
        await world.until(
            lambda: (
                not world.gateway.follower.connection
                or not len(world.gateway.follower.connection.submissions.readers)
            )
        )

    assert response.status_code == 503
    assert bool(world.events("control")) == cancels


async def test_a_client_that_stays_to_the_end_cancels_nothing() -> None:
    async with (
        deployment(echo) as world,
        listening(world) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for _ in range(3):  # on one connection that is kept alive
            response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
            assert response.text.endswith("data: [DONE]\n\n")

    assert world.events("control") == []


async def test_only_the_last_client_of_a_request_cancels_it() -> None:
    body = {"text": "x", "request_id": "shared"}
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, "/generate", body) as second:
            async with raw(url, "/generate", body) as first:
                await first.readuntil(b"\r\n\r\n")
                await second.readuntil(b"\r\n\r\n")
            await world.until(lambda: world.gateway.in_flight.count == 1)
            assert world.events("control") == []
        await cancelled(world)

    assert len(world.events("control")) == 1


async def test_a_client_attached_to_somebody_elses_request_does_not_cancel_it() -> None:
    body = {"text": "x", "request_id": "shared"}
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        strangers = RequestSubmitted(request_id="shared", model="demo", inputs=Inputs(text="x"))
        world.server.append(world.subjects.request("shared"), encode(strangers))
        async with raw(url, "/generate", body) as reader:
            await reader.readuntil(b"\r\n\r\n")
        await world.until(lambda: not world.gateway.in_flight.count)
        for _ in range(10):
            await asyncio.sleep(0)

    assert world.events("control") == []


async def test_a_cancelled_request_ends_with_410_for_who_still_waits() -> None:
    async with deployment(wait_for_cancel) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(world.client.post("/generate", json={"text": "silent"}))
            performance = await world.performance()
            cancel = RequestCancel(request_id=performance.request_id, reason="an operator said so")
            world.server.append(world.subjects.control(performance.request_id), encode(cancel))
        response = asking.result()

    assert response.status_code == 410
    assert "an operator said so" in response.json()["error"]["message"]


async def test_a_client_that_does_not_read_stalls_nobody_and_is_bounded() -> None:
    size, count = 20_000, 600

    async def flood(performance: Performance) -> None:
        if performance.event.inputs.text != "flood":
            await echo(performance)
            return
        for _ in range(count):
            performance.say("z" * size)
            await asyncio.sleep(0)
        performance.finish()

    body = {"model": "demo", "prompt": "flood", "stream": True}
    async with (
        deployment(flood) as world,
        listening(world) as url,
        raw(url, "/v1/completions", body) as reader,
        httpx.AsyncClient(base_url=url) as client,
    ):
        await reader.readuntil(b"\r\n\r\n")
        slow = await world.performance()
        await world.until(lambda: slow.transcript.next_index == count)
        quick = await client.post("/generate", json={"text": "a b", "streaming": False})
        assert world.gateway.follower.connection is not None
        assert world.gateway.in_flight.count == 1  # the slow client has not read all
        assert (
            len(world.gateway.follower.connection.submissions._router) == 0
        )  # dropped: the rest is read from the log
        received = bytearray()
        while b"[DONE]" not in received[-100:]:
            received += await reader.read(1 << 20)

    assert quick.status_code == 200
    assert received.count(b"z") == size * count
    assert size * count > 10 * BUFFER_BYTES
