"""The limits of a body's size and duration."""

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from configs.deployment import GatewaySettings
from gateway.middleware.body_limit import (
    LARGEST_AT_ONCE,
    SLOWEST_BYTES_PER_S,
    BodiesTooLargeError,
    BodyLimit,
    BodyTimeoutError,
)
from tests.gateway.http.test_connection import Client
from tests.gateway.test_errors import error_of
from tests.gateway.world import CHAT, deployment, listening

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


async def connected(url: str) -> Client:
    host, port = url.removeprefix("http://").split(":")
    return Client(*await asyncio.open_connection(host, int(port), limit=2**16))


async def zeros(size_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(size_bytes // 65536):
        yield bytes(65536)


# ---- how late --------------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_a_body_that_stops_is_408_and_its_connection_ends() -> None:
    settings = GatewaySettings(body_timeout_s=0.05)
    async with deployment(settings=settings) as world, listening(world) as url:
        client = await connected(url)
        await client.send(HEAD + b"Content-Length: 1000\r\n\r\n{")
        status, _, code = await client.error()
        client.writer.write_eof()
        assert await client.end() == b""
        client.writer.close()

    assert (status, code) == (408, "body_timeout")
    assert not world.events("request")


@pytest.mark.processes
async def test_a_body_may_pause_for_less() -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
    settings = GatewaySettings(body_timeout_s=20)
    async with deployment(settings=settings) as world, listening(world) as url:
        client = await connected(url)
        await client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for byte in body:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        status, _, _ = await client.answer()
        client.writer.close()

    assert status == 200


async def test_a_body_that_drips_is_given_up_however_short_its_pauses() -> None:
    now_s = 0.0
    pieces = 0

    async def drip() -> Message:
        nonlocal now_s, pieces
        now_s += 9.0  # of 10
        pieces += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    limit = BodyLimit(read_all, limit_bytes=2**20, timeout_s=10, clock=lambda: now_s)
    with pytest.raises(BodyTimeoutError):
        await limit({"type": "http", "headers": []}, drip, drip)  # type: ignore[arg-type] # nothing is sent

    assert pieces == 3


async def test_a_large_body_has_the_time_it_needs() -> None:
    now_s = 0.0
    pieces = 0

    async def steady() -> Message:
        nonlocal now_s, pieces
        now_s += 9.0
        pieces += 1
        return {"type": "http.request", "body": b"x" * 9 * SLOWEST_BYTES_PER_S, "more_body": pieces < 100}

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    await BodyLimit(read_all, limit_bytes=2**20, timeout_s=10, clock=lambda: now_s)(
        {"type": "http", "headers": []},
        steady,
        steady,  # type: ignore[arg-type] # nothing is sent
    )

    assert pieces == 100


# ---- how large -------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("length", [b"Content-Length: 2147483648\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/nowhere"])
async def test_an_upload_of_gigabytes_is_refused_and_takes_no_memory(length: bytes, path: str) -> None:
    async with deployment(max_body_bytes=1 << 20) as world, listening(world) as url:
        client = await connected(url)
        before = resident_bytes()
        await client.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path.encode(), length))
        piece = bytes(65536)
        if length.startswith(b"Transfer"):
            piece = b"10000\r\n" + piece + b"\r\n"
        sending = asyncio.create_task(send_all(client, piece, 16 << 20))
        status, headers, code = await client.error()
        await asyncio.wait({sending})
        sending.exception()
        after = resident_bytes()
        client.writer.close()

    assert (status, code) in {(413, "body_too_large"), (404, "not_found")}
    assert headers["connection"] == "close"
    assert after - before < 24 << 20


async def send_all(client: Client, piece: bytes, size_bytes: int) -> None:
    for _ in range(size_bytes // len(piece)):
        await client.send(piece)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
async def test_a_part_of_a_form_counts_as_the_body_it_is_in() -> None:
    async with deployment(max_body_bytes=10_000) as world:
        refused = [
            await world.client.post(
                "/generate", files={"files": ("a.bin", b"x" * 20_000)}, data={"text": "hi"}
            ),
            await world.client.post("/generate", data={"text": "x" * 20_000}),
        ]
        taken = await world.client.post("/generate", data={"text": "hi", "streaming": "false"})

    for answer in refused:
        assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert taken.status_code == 200


@pytest.mark.slow
async def test_the_limit_is_the_setting() -> None:
    body = CHAT | {"user": "x" * 3000}
    found = []
    for limit in (2048, 4096):
        async with deployment(max_body_bytes=limit) as world:
            found.append((await world.client.post("/v1/chat/completions", json=body)).status_code)

    assert found == [413, 200]


@pytest.mark.processes
async def test_a_small_body_that_was_not_read_keeps_its_connection() -> None:
    async with deployment() as world, listening(world) as url:
        client = await connected(url)
        for _ in range(3):
            await client.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello")
            status, headers, _ = await client.error()
            assert status == 404
            assert "connection" not in headers
        client.writer.close()


async def test_all_bodies_together_are_bounded_and_one_that_is_answered_counts_no_more() -> None:
    answer, all_are_held = asyncio.Event(), asyncio.Event()
    held = 0

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal held
        while (await receive())["more_body"]:
            pass
        held += 1
        if held == LARGEST_AT_ONCE:
            all_are_held.set()
        await answer.wait()

    async def large() -> Message:
        return {"type": "http.request", "body": bytes(1000), "more_body": False}

    limit = BodyLimit(read_all, limit_bytes=1000, timeout_s=10)
    scope: Scope = {"type": "http", "headers": []}
    async with asyncio.TaskGroup() as tasks:
        for _ in range(LARGEST_AT_ONCE):
            tasks.create_task(limit(scope, large, large))  # type: ignore[arg-type] # nothing is sent
        await all_are_held.wait()
        with pytest.raises(BodiesTooLargeError, match="try again"):
            await limit(scope, large, large)  # type: ignore[arg-type]
        answer.set()

    await limit(scope, large, large)  # type: ignore[arg-type]
    assert held == LARGEST_AT_ONCE + 1
