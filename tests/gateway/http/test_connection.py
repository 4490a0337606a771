"""Time limits of connections, on real sockets. The tests pass the time, or use small limits."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.deployment import GatewaySettings
from gateway.http import connection, server
from gateway.http.connection import HttpConnection

pytestmark = pytest.mark.processes


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: "


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


class Endless:
    """An application with an endless answer; it counts the sent bytes, and notices the disconnect."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.left = asyncio.Event()
        self.sent_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()

        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.begun.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
            while not self.left.is_set():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.sent_bytes += 65536
                await asyncio.sleep(0)


class Client:
    """A client with one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_for_ever(self, piece: bytes = b"x" * 65536) -> None:
        while True:
            await self.send(piece)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer, by its content-length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def error(self) -> tuple[int, dict[str, str], str]:
        """The next answer, which must be an error with the common body; the last value is its code."""
        status, headers, body = await self.answer()
        assert headers["content-type"] == "application/json"
        error: dict[str, Any] = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, headers, str(error["code"])

    async def end(self) -> bytes:
        """The bytes until the server closes."""
        return await self.reader.read()


class Serving:
    """A server and its connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[HttpConnection] = []

    @asynccontextmanager
    async def client(self, received_bytes: int | None = None) -> AsyncIterator[Client]:
        sock = socket.socket()
        if received_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()

    def look(self, later_s: float) -> None:
        """Check the time limits of all connections as of so many seconds from now."""
        for one in list(self.connections):
            one.check_timeouts(time.monotonic() + later_s)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """All connections that the server creates."""
    found: list[HttpConnection] = []

    class Recorded(HttpConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            found.append(self)
            super().connection_made(transport)

    monkeypatch.setattr(server, "HttpConnection", Recorded)
    return found


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test checks time limits, so that it can choose the time."""
    monkeypatch.setattr(connection.ConnectionLimits, "check_every_s", 3600.0)


@asynccontextmanager
async def serving(
    made: list[HttpConnection], app: ASGIApp = hello, **settings: Any
) -> AsyncIterator[Serving]:
    listener = server.bind("127.0.0.1", 0)
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 65536
    )  # small kernel buffers, so that a client that does not read is noticed
    found = Serving(listener.getsockname()[1])
    found.connections = made
    async with asyncio.timeout(30), server.serving(app, listener, GatewaySettings(**settings)):
        yield found


# ---- heads -----------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_end_is_answered_with_408(made: list[HttpConnection]) -> None:
    async with serving(made, header_timeout_s=0.05) as served, served.client() as client:
        await client.send(HALF)
        status, headers, code = await client.error()
        rest = await client.end()

    assert (status, code, headers["connection"], rest) == (408, "header_timeout", "close", b"")


async def test_a_head_that_drips_is_no_head(made: list[HttpConnection]) -> None:
    async with (
        serving(made, header_timeout_s=0.2) as served,
        served.client() as client,
        asyncio.TaskGroup() as tasks,
    ):
        answering = tasks.create_task(client.error())
        for byte in HALF * 1000:
            client.writer.write(bytes([byte]))
            await asyncio.wait({answering}, timeout=0.01)
            if answering.done():
                break

    assert answering.result()[0] == 408


async def test_who_asks_nothing_is_left_without_an_answer(made: list[HttpConnection]) -> None:
    async with serving(made, header_timeout_s=0.05) as served, served.client() as client:
        assert await client.end() == b""


@pytest.mark.usefixtures("by_hand")
async def test_a_head_has_as_long_as_the_setting_says(made: list[HttpConnection]) -> None:
    async with serving(made, header_timeout_s=20) as served, served.client() as client:
        await client.send(GET + HALF)
        assert (await client.answer())[0] == 200
        served.look(19)
        await client.send(b"x\r\n\r\n")
        assert (await client.answer())[0] == 200
        await client.send(HALF)
        await until(lambda: made[0].client_transport.request_is_open)
        served.look(21)
        assert (await client.error())[0] == 408


async def test_an_endless_head_is_431(made: list[HttpConnection]) -> None:
    async with serving(made) as served, served.client() as client:
        await client.send(HALF)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(client.error())
            while not answering.done():
                client.writer.write(b"x" * 16384)
                await asyncio.sleep(0)

    assert answering.result()[0::2] == (431, "headers_too_large")


async def test_a_head_that_is_too_long_is_431_also_when_it_comes_at_once(made: list[HttpConnection]) -> None:
    async with serving(made) as served, served.client() as client:
        await client.send(GET[:-2] + b"x: " + b"x" * connection.MAX_HEAD_BYTES + b"\r\n\r\n")
        assert (await client.error())[0::2] == (431, "headers_too_large")
        assert await client.end() == b""


async def test_what_is_no_http_is_400_in_our_words(made: list[HttpConnection]) -> None:
    async with serving(made) as served, served.client() as client:
        await client.send(b"\x16\x03\x01 hello\r\n\r\n")
        status, headers, code = await client.error()
        assert (status, headers["connection"], code) == (400, "close", "invalid_http")


# ---- what is around a body -------------------------------------------------------------------------------


class Reader:
    """An application that reads its request to the end, and returns it."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.headers = list(scope["headers"])
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})


async def test_a_body_comes_with_an_upgrade_that_is_not_granted(made: list[HttpConnection]) -> None:
    offer = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    )
    async with serving(made, Reader()) as served, served.client() as client:
        for _ in range(2):
            await client.send(offer + b"Content-Length: 5\r\n\r\n")
            await client.send(b"GET /")
            assert (await client.answer())[0::2] == (200, b"GET /")


async def test_what_comes_behind_a_body_is_no_header(made: list[HttpConnection]) -> None:
    app = Reader()
    async with serving(made, app) as served, served.client() as client:
        await client.send(CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert (await client.answer())[2] == b"x"

    assert app.headers == [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("wrong", [b"zz\r\n", b"2\r\nxyz\r\n", b"-1\r\n"])
async def test_a_body_that_is_no_http_is_400(made: list[HttpConnection], wrong: bytes) -> None:
    async with serving(made, Reader()) as served, served.client() as client:
        await client.send(CHUNKED + b"1\r\nx\r\n")
        await client.send(wrong)
        assert (await client.error())[0::2] == (400, "invalid_http")
        assert await client.end() == b""


@pytest.mark.parametrize("endless", [b"1;", b"0\r\nTrailer: ", b"0\r\n"])
async def test_what_is_around_a_body_has_an_end(made: list[HttpConnection], endless: bytes) -> None:
    piece = b"a: b\r\n" * 4096 if endless.endswith(b"\n") else b"x" * 32768
    async with serving(made, Reader()) as served, served.client() as client:
        await client.send(CHUNKED + endless)
        with pytest.raises(ConnectionError):
            await client.send_for_ever(piece)


async def test_the_smallest_chunks_make_a_body(made: list[HttpConnection]) -> None:
    async with serving(made, Reader()) as served, served.client() as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 100_000
        )
        await client.send(b"0\r\n\r\n")
        assert len((await client.answer())[2]) == 100_000


# ---- between requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", [b"", b"\r\n"])
async def test_a_connection_that_is_idle_is_closed(made: list[HttpConnection], meanwhile: bytes) -> None:
    settings: dict[str, Any] = {"idle_timeout_s": 0.05, "header_timeout_s": 0.05}
    async with serving(made, **settings) as served, served.client() as client:
        await client.send(GET)
        assert (await client.answer())[2] == b"hello"
        await client.send(meanwhile)
        assert b"200" not in await client.end()


@pytest.mark.usefixtures("by_hand")
async def test_a_connection_is_kept_for_the_next_request(made: list[HttpConnection]) -> None:
    async with serving(made, idle_timeout_s=75) as served, served.client() as client:
        for _ in range(3):
            await client.send(GET)
            assert (await client.answer())[2] == b"hello"
            served.look(70)

    assert len(made) == 1


# ---- how many --------------------------------------------------------------------------------------------


async def test_a_connection_too_many_is_503_until_one_is_closed(made: list[HttpConnection]) -> None:
    async with serving(made, max_connections=2) as served, served.client() as first:
        async with served.client() as second:
            for client in (first, second):
                await client.send(GET)
                assert (await client.answer())[0] == 200
            async with served.client() as third:
                await third.send(GET)
                status, headers, code = await third.error()
                assert await third.end() == b""
            assert (status, code, headers["connection"]) == (503, "too_many_connections", "close")
            assert int(headers["retry-after"]) > 0
        await until(lambda: len(made[0].connections) == 1)
        async with served.client() as fourth:
            await fourth.send(GET)
            assert (await fourth.answer())[0] == 200


# ---- answers that nobody takes ---------------------------------------------------------------------------


async def test_a_client_that_takes_nothing_is_cut_off(made: list[HttpConnection]) -> None:
    app = Endless()
    async with serving(made, app, send_timeout_s=0.1) as served, served.client(65536) as client:
        await client.send(GET)
        await app.left.wait()

    assert app.sent_bytes < 32 * 2**20  # the kernel's buffers, and not the whole answer


@pytest.mark.usefixtures("by_hand")
async def test_a_client_that_takes_little_is_not(made: list[HttpConnection]) -> None:
    app = Endless()
    async with serving(made, app, send_timeout_s=60) as served, served.client(65536) as client:
        await client.send(GET)
        await app.begun.wait()
        await until(lambda: made[0].flow.write_paused)
        for minute in range(10):
            served.look(55 * minute)
            taken = made[0].client_transport.sent_bytes
            while made[0].client_transport.sent_bytes == taken:
                await client.reader.read(65536)
                await asyncio.sleep(0)
        assert not app.left.is_set()
        await until(lambda: made[0].flow.write_paused)
        served.look(55 * 10)
        served.look(55 * 10 + 61)
        await app.left.wait()


@pytest.mark.usefixtures("by_hand")
async def test_a_server_that_is_told_to_end_does_not_wait_for_its_next_look(
    made: list[HttpConnection],
) -> None:
    async with serving(made) as served, served.client() as client:
        await client.send(GET)
        assert (await client.answer())[0] == 200


async def test_a_server_that_ends_does_not_wait_for_a_client_that_takes_nothing(
    made: list[HttpConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CUT_S", 0.2)
    app = Endless()
    async with serving(made, app, send_timeout_s=1000) as served, served.client(65536) as client:
        await client.send(GET)
        await until(lambda: bool(made) and made[0].flow.write_paused)
        begun_s = time.monotonic()

    assert app.left.is_set()
    assert time.monotonic() - begun_s < 5


# ---- requests that nobody reads --------------------------------------------------------------------------


class Refusal:
    """An application that answers at once, and closes the connection or does not."""

    def __init__(self, *, closes: bool) -> None:
        self.closes = closes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"2"), *([(b"connection", b"close")] if self.closes else [])]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})


POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def test_a_client_that_still_sends_reads_why_it_was_refused(made: list[HttpConnection]) -> None:
    async with serving(made, Refusal(closes=True)) as served, served.client() as client:
        await client.send(POST % 10**9)
        for _ in range(32):
            await client.send(b"x" * 65536)  # the connection is not reset
        status, _, body = await client.answer()
        rest = await client.end()

    assert (status, body, rest) == (413, b"no", b"")


@pytest.mark.usefixtures("by_hand")
async def test_the_rest_of_a_request_is_thrown_away_for_a_while_only(made: list[HttpConnection]) -> None:
    async with serving(made, Refusal(closes=True)) as served, served.client() as client:
        await client.send(POST % 10**9)
        await client.answer()
        served.look(0)
        assert made[0].client_transport.is_lingering
        served.look(connection.LINGERING_CLOSE_S + 1)
        await until(lambda: not made[0].connections)


async def test_the_rest_of_a_request_is_thrown_away_up_to_a_bound(
    made: list[HttpConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGERING_CLOSE_BYTES", 100_000)
    async with serving(made, Refusal(closes=True)) as served, served.client() as client:
        await client.send(POST % 10**9)
        with pytest.raises(ConnectionError):
            await client.send_for_ever()


@pytest.mark.usefixtures("by_hand")
async def test_a_connection_that_is_kept_waits_for_the_rest_of_a_request_but_not_for_ever(
    made: list[HttpConnection],
) -> None:
    async with serving(made, Refusal(closes=False)) as served, served.client() as client:
        await client.send(POST % 10)
        assert (await client.answer())[0] == 413
        await client.send(b"x" * 10 + POST % 10)
        assert (await client.answer())[0] == 413
        served.look(0)
        served.look(connection.LINGERING_CLOSE_S + 1)
        await until(lambda: not made[0].connections)


async def until(condition: Any) -> None:
    """Let the other tasks run until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)
