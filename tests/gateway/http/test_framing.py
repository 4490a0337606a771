"""Answers to HTTP/1.0, to HEAD, and to clients that close their sending side, on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import uvloop

from tests.gateway.world import CHAT, Performance, World, deployment, listening

pytestmark = pytest.mark.processes
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
STREAM = json.dumps(CHAT | {"stream": True}).encode()
DOCUMENT = json.dumps(CHAT).encode()


def post(body: bytes, version: str = "1.1", path: str = "/v1/chat/completions", *fields: bytes) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    more = b"".join(field + b"\r\n" for field in fields)
    return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(world: World, request: bytes, *, half_close: bool = False) -> bytes:
    """All bytes of the answer, until the server closes."""
    async with listening(world) as url, connected(url) as (reader, writer):
        writer.write(request)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(20):
            found: bytes = await reader.read()
            return found


@pytest.mark.parametrize("body", [STREAM, DOCUMENT])
async def test_http_1_0_gets_no_chunks_and_the_close_ends_the_body(body: bytes) -> None:
    async with deployment() as world:
        answer = await exchange(world, post(body, "1.0", "/v1/chat/completions", b"Expect: 100-continue"))

    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if body == STREAM:
        assert content.startswith(b"id: ")
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(content)["object"] == "chat.completion"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [STREAM, DOCUMENT])
async def test_a_client_that_closes_its_sending_side_gets_its_answer(version: str, body: bytes) -> None:
    async with deployment() as world:
        answer = await exchange(world, post(body, version), half_close=True)

    final = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert final.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"[DONE]" if body == STREAM else b"chat.completion") in final
    if version == "1.1" and body == STREAM:
        assert final.endswith(b"0\r\n\r\n")


@LOOPS
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("body", [STREAM, DOCUMENT])
def test_a_client_that_leaves_is_noticed_before_and_within_its_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], begins: bool, body: bytes
) -> None:
    async def wait_for_cancel(performance: Performance) -> None:
        if begins:
            performance.say("begun")
        await performance.cancelled.wait()

    async def leave() -> None:
        async with deployment(wait_for_cancel) as world, listening(world) as url:
            async with connected(url) as (reader, writer):
                writer.write(post(body))
                performance = await world.performance()
                if begins and body == STREAM:
                    await reader.readuntil(b"begun")
                writer.close()
            async with asyncio.timeout(20):
                await performance.cancelled.wait()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(leave())


@LOOPS
def test_a_client_that_closes_its_sending_side_within_a_stream_gets_the_rest_in_whole_chunks(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def wait(performance: Performance) -> None:
        performance.say("begun")
        await resumed.wait()
        performance.say(" ended")
        performance.finish()

    async def read() -> bytes:
        async with deployment(wait) as world, listening(world) as url, connected(url) as (reader, writer):
            writer.write(post(STREAM))
            found: bytes = await reader.readuntil(b"begun")
            writer.write_eof()
            received = await reader.readuntil(b"\n\n\r\n0")  # the probe has been sent
            resumed.set()
            async with asyncio.timeout(20):
                return found + received + await reader.read()

    resumed = asyncio.Event()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        content = dechunked(runner.run(read()).partition(b"\r\n\r\n")[2])
    assert b" ended" in content
    assert content.endswith(b"data: [DONE]\n\n")


def dechunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]
    return found


async def test_a_request_that_ends_too_early_is_refused() -> None:
    async with deployment() as world:
        answer = await exchange(world, post(STREAM)[:-5], half_close=True)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/health/live", "/health/ready", "/version", "/metrics", "/metrics.json", "/v1/models",
     "/v1/models/demo", "/openapi.json", "/v1/requests/unknown", "/v1/files", "/nowhere"],
)  # fmt: skip
async def test_head_is_get_without_a_body(path: str) -> None:
    async def answer_to(method: str, world: World) -> tuple[bytes, set[bytes], bytes]:
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        head, _, body = (await exchange(world, request.encode())).partition(b"\r\n\r\n")
        status, *fields = head.split(b"\r\n")
        return status, {field.partition(b":")[0] for field in fields}, body

    async with deployment() as world:
        status, names, body = await answer_to("GET", world)
        assert body
        assert await answer_to("HEAD", world) == (status, names, b"")


async def test_head_of_a_route_without_get_is_405_and_the_others_name_it() -> None:
    async with deployment() as world:
        wrong = await world.client.head("/generate")
        posted = await world.client.post("/v1/models")

    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert posted.headers["allow"] == "GET, HEAD"
