"""Anchors are appended to a file, posted to an address, and sent again until they are accepted."""

import asyncio
import base64
from pathlib import Path

import pytest

from conductor.sealing import places
from conductor.sealing.anchoring import AnchorError, Anchoring
from conductor.sealing.places import FilePlace, NatsPlace, UrlPlace, place_of
from configs.deployment import ConfigError
from shared.log.nats.connection import NatsConnection
from shared.log.nats.private_server import NatsServer
from shared.sealing import anchors
from shared.sealing.anchors import Anchor

pytestmark = pytest.mark.processes


def anchor(last_seq: int) -> Anchor:
    return Anchor(
        stream="DS_LOG", created_ns=1, seq=last_seq + 1, last_seq=last_seq, last_ns=5, chain="c", key="k"
    )


async def test_a_file_is_appended_to(tmp_path: Path) -> None:
    place = FilePlace(tmp_path / "deep" / "anchors.jsonl")
    for last_seq in (5, 9):
        await place.put(anchor(last_seq))
    with (tmp_path / "deep" / "anchors.jsonl").open("rb") as file:
        assert [one.last_seq for one in anchors.read(file)] == [5, 9]
    assert place.last("DS_LOG", 1) == anchor(9)
    assert place.last("DS_LOG", 2) is None


async def test_a_line_that_a_crash_cut_off_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "anchors.jsonl"
    await FilePlace(path).put(anchor(5))
    path.write_bytes(path.read_bytes() + b'{"stream":"DS')
    await FilePlace(path).put(anchor(9))
    with path.open("rb") as file:
        assert [one.last_seq for one in anchors.read(file)] == [5, 9]


async def test_an_address_gets_a_post() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        seen.append(await reader.readexactly(length))
        status = b"503 Busy" if len(seen) == 1 else b"204 No Content"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        place = UrlPlace(f"http://127.0.0.1:{port}/anchors")
        with pytest.raises(AnchorError, match="503"):
            await place.put(anchor(5))
        await place.put(anchor(5))
    assert anchors.read(seen) == [anchor(5), anchor(5)]


async def test_what_was_refused_is_sent_again() -> None:
    class Refusing:
        name = "refusing"

        def __init__(self) -> None:
            self.kept: list[Anchor] = []
            self.refuses = True

        async def put(self, one: Anchor) -> None:
            if self.refuses:
                raise AnchorError("busy")
            self.kept.append(one)

        def last(self, stream: str, created_ns: int) -> Anchor | None:
            return None

    place = Refusing()
    anchoring = Anchoring([place])
    anchoring.put(anchor(5))
    await anchoring.flush()
    place.refuses = False
    anchoring.put(anchor(9))
    await anchoring.flush()
    await anchoring.flush()
    assert place.kept == [anchor(9)]


def test_no_secret_is_in_a_name() -> None:
    assert isinstance(place_of("nats://me:secret@host:4222/subject"), NatsPlace)
    assert place_of("nats://me:secret@host:4222/subject").name == "nats://host:4222/subject"
    assert place_of("https://me:secret@host/path").name == "https://host/path"


async def answered(url: str, answer: bytes) -> bytes:
    """Put an anchor at `url` (with `{port}`), whose server gives this answer; return the request's head."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await place_of(url.format(port=server.sockets[0].getsockname()[1])).put(anchor(5))
    (head,) = heads
    return head


async def test_the_password_of_an_address_is_sent_in_a_header() -> None:
    head = await answered("http://me:s%40cret@127.0.0.1:{port}/a", b"204 No Content")
    assert b"Authorization: Basic " + base64.b64encode(b"me:s@cret") in head
    assert b"cret@" not in head


async def test_a_redirect_stores_no_anchor() -> None:
    with pytest.raises(AnchorError, match="302"):
        await answered("http://127.0.0.1:{port}/a", b"302 Found\r\nLocation: /b")


async def test_no_password_is_in_an_error() -> None:
    with pytest.raises(AnchorError) as caught:
        await place_of("http://me:secret@localhost:1/a").put(anchor(5))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "nats://me:secret@host:port/a",
        "http://me:secret@host:port/a",
        "nats://me:secret@host/",
        "nats://secret/a.*",
    ],
)
def test_an_address_that_cannot_work_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sealing\.anchors") as caught:
        place_of(url)
    assert "secret" not in str(caught.value)


async def test_a_reply_that_is_not_of_a_stream_is_an_error_of_its_place(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = NatsConnection(nats_server.url)
    await own.open(credentials=nats_server.credentials, name="test", timeout_s=10)
    monkeypatch.setattr(places, "ANONYMOUS", nats_server.credentials)
    own.attach(
        "plain", lambda _subject, reply, _data, _header: own.send_publish(reply.decode(), "", b"ok", None)
    )
    place = NatsPlace(f"{nats_server.url}/plain")
    try:
        with pytest.raises(AnchorError, match="reply of a stream"):
            await place.put(anchor(5))
    finally:
        await own.close()
        assert place._connection is not None
        await place._connection.close()
