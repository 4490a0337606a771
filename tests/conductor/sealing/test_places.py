"""Anchors are appended to a file, posted to an address, and sent again until they are accepted."""

import asyncio
from pathlib import Path

import pytest

from conductor.sealing.anchoring import AnchorError, Anchoring
from conductor.sealing.places import FilePlace, NatsPlace, UrlPlace, place_of
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
