"""Media from http(s) addresses: pinned to the checked address, bounded, and redirected to no other host."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from configs.deployment import MediaSettings
from gateway.errors import InvalidParamError
from gateway.media.allowed_hosts import IpAddress
from gateway.media.remote import RemoteMedia
from gateway.media.sources import RemoteSource
from tests.gateway.media.world import chat, image, png, seeing, submitted

pytestmark = pytest.mark.processes

Answer = Callable[[str, int], bytes]
WHERE = "messages[0].content[0].image_url"


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(target: str) -> bytes:
    return (
        f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    )


@asynccontextmanager
async def host(answer: Answer) -> AsyncIterator[tuple[int, list[str]]]:
    """A web server on 127.0.0.1: its port, and the heads of its requests."""
    heads: list[str] = []
    closed = asyncio.Queue[None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        writer.write(answer(head, port))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.put_nowait(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield port, heads
        for _ in heads:
            await closed.get()


async def load(url: str, resolve: Any = None, **settings: Any) -> bytes:
    remote = RemoteMedia(MediaSettings(**settings), resolve)
    spool = await remote.load(RemoteSource(where=WHERE, url=url))
    try:
        return b"".join([chunk async for chunk in spool.chunks()])
    finally:
        spool.close()


def resolving(*addresses: str) -> Any:
    """A resolver that gives one answer after the other."""
    answers = [[ip_address(one) for one in text.split()] for text in addresses]

    async def resolve(host: str, port: int) -> list[IpAddress]:
        return answers.pop(0)

    return resolve


async def test_an_allowed_host_is_asked_under_its_name_at_the_checked_address() -> None:
    async with host(lambda head, port: ok(png())) as (port, heads):
        data = await load(
            f"http://cats.localhost:{port}/a.png?b=c",
            resolving("127.0.0.1"),
            allowed_hosts=["cats.localhost"],
        )

    assert data == png()
    assert heads[0].startswith("GET /a.png?b=c HTTP/1.1\r\n")
    assert f"host: cats.localhost:{port}\r\n" in heads[0].lower()


@pytest.mark.parametrize("listed", ["straße.example", "xn--strae-oqa.example"])
async def test_the_resolver_is_asked_for_the_name_that_is_listed(listed: str) -> None:
    """The machine's resolver itself takes `straße` for `strasse` (IDNA 2003), which is another host."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[IpAddress]:
        asked.append(name)
        raise OSError

    with pytest.raises(InvalidParamError, match="has no address"):
        await load("http://straße.example/cat.png", resolve, allowed_hosts=[listed])
    assert asked == ["xn--strae-oqa.example"]


@pytest.mark.parametrize(
    ("url", "allowed", "code"),
    [
        ("http://a.example/x", [], "media_host_not_allowed"),
        ("http://b.example/x", ["a.example"], "media_host_not_allowed"),
        ("http://user:secret@a.example/x", ["a.example"], "invalid_value"),
        ("http:///x", ["*"], "invalid_value"),
        ("http://a.example:99999/x", ["*"], "invalid_value"),
    ],
)
async def test_a_host_that_is_not_listed_is_not_even_resolved(
    url: str, allowed: list[str], code: str
) -> None:
    with pytest.raises(InvalidParamError) as refused:
        await load(url, resolving(), allowed_hosts=allowed)

    assert (refused.value.param, refused.value.code) == (WHERE, code)
    assert "media.allowed_hosts" in refused.value.message or code != "media_host_not_allowed"


@pytest.mark.parametrize("addresses", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "93.184.215.14 10.0.0.1"])
async def test_a_listed_host_with_a_private_address_is_refused(addresses: str) -> None:
    with pytest.raises(InvalidParamError) as refused:
        await load("http://a.example/x", resolving(addresses), allowed_hosts=["*"])

    assert refused.value.code == "media_host_not_allowed"
    assert "private or reserved" in refused.value.message


async def test_each_redirect_is_resolved_and_checked_again() -> None:
    def answer(head: str, port: int) -> bytes:
        return redirect("/second") if head.startswith("GET /first") else ok(png())

    async with host(answer) as (port, _):
        url = f"http://cats.localhost:{port}/first"
        allowed = ["cats.localhost"]
        data = await load(url, resolving("127.0.0.1", "127.0.0.1"), allowed_hosts=allowed)
        with pytest.raises(InvalidParamError, match="private or reserved"):
            await load(url, resolving("127.0.0.1", "169.254.169.254"), allowed_hosts=allowed)

    assert data == png()


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}/x", "http://other.example/", "file:///etc/passwd"]
)
async def test_a_redirect_to_another_host_is_not_followed(target: str) -> None:
    async with host(lambda head, port: redirect(target.format(port=port))) as (port, heads):
        with pytest.raises(InvalidParamError) as refused:
            await load(
                f"http://cats.localhost:{port}/x",
                resolving("127.0.0.1", "127.0.0.1"),
                allowed_hosts=["cats.localhost", "127.0.0.1", "other.example"],
            )

    assert refused.value.code == "media_not_loaded"
    assert len(heads) == 1


async def test_redirects_have_an_end() -> None:
    async with host(lambda head, port: redirect("/again")) as (port, heads):
        with pytest.raises(InvalidParamError, match="redirects more than"):
            await load(f"http://127.0.0.1:{port}/x", allowed_hosts=["127.0.0.1"])

    assert len(heads) <= 6


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ok(bytes(5000)), "expected at most 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(5000), "expected at most 4096 bytes"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (ok(b"x", "Content-Encoding: gzip"), "compressed"),
        (b"SSH-2.0\r\n", "did not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\nshort", "did not answer"),
    ],
)
async def test_a_wrong_answer_of_the_host_is_an_error_that_names_the_part(
    answer: bytes, problem: str
) -> None:
    async with host(lambda head, port: answer) as (port, _):
        with pytest.raises(InvalidParamError, match=problem) as refused:
            await load(f"http://127.0.0.1:{port}/x", allowed_hosts=["127.0.0.1"], max_bytes=4096)

    assert refused.value.param == WHERE


async def test_a_host_that_does_not_answer_is_given_up() -> None:
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        closed.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(InvalidParamError, match=r"within 0\.1 s"):
            await load(f"http://127.0.0.1:{port}/x", allowed_hosts=["127.0.0.1"], fetch_timeout_s=0.1)
        await closed.wait()


async def test_a_chat_with_an_address_gets_the_image_of_the_host() -> None:
    async with host(lambda head, port: ok(png(), "Content-Type: text/plain")) as (port, _):
        settings = MediaSettings(allowed_hosts=["127.0.0.1"])
        async with seeing(settings) as world:
            body = chat(image(f"http://127.0.0.1:{port}/cat.png"))
            response = await world.client.post("/v1/chat/completions", json=body)
            [file] = submitted(world).inputs.files

    assert response.status_code == 200
    assert (file.content_type, file.size) == ("image/png", len(png()))
