"""The proxy between a role and NATS: it forwards, cuts, stalls, heals, and reports what passes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.ledger import Ledger, Wire, digest
from tests.chaos.proxy import Moment, Proxy
from tests.chaos.rawlog import Record


@asynccontextmanager
async def echoing() -> AsyncGenerator[Proxy, None]:
    """A proxy to an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


@asynccontextmanager
async def connected(
    proxy: Proxy,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.processes
async def test_what_is_said_passes_both_ways() -> None:
    async with echoing() as proxy, connected(proxy) as (reader, writer):
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"


@pytest.mark.processes
async def test_a_cut_resets_what_there_is_and_what_comes_until_it_heals() -> None:
    async with echoing() as proxy:
        async with connected(proxy) as (reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                assert await reader.read() == b"never"
        async with connected(proxy) as (reader, _):
            with pytest.raises(ConnectionResetError):
                assert await reader.read() == b"never"
        proxy.heal()
        async with connected(proxy) as (reader, writer):
            writer.write(b"again\n")
            assert await reader.readline() == b"again\n"


@pytest.mark.processes
async def test_what_is_stalled_goes_on_where_it_was() -> None:
    async with echoing() as proxy, connected(proxy) as (reader, writer):
        passed: list[Moment] = []
        proxy.watch = passed.append
        proxy.stall()
        writer.write(b"PUB ds.walk.a 0\r\n\r\n")
        await writer.drain()
        assert not passed
        proxy.heal()
        assert await reader.readline() == b"PUB ds.walk.a 0\r\n"
        assert passed == [Moment.FORWARDING, Moment.FORWARDED]


@pytest.mark.processes
async def test_events_and_acks_are_told_and_beats_are_not() -> None:
    async with echoing() as proxy, connected(proxy) as (reader, writer):
        passed: list[Moment] = []
        proxy.watch = passed.append
        ack = b'{"stream":"DS_LOG","seq":17}'
        writer.write(b"PUB ds.beat.worker.0 1\r\nx\r\nPUB ds.output.g.r.w0 _INBOX.1 5\r\nhello\r\n")
        writer.write(b"MSG _INBOX.1 1 %d\r\n%s\r\n" % (len(ack), ack))
        for _ in range(6):
            await reader.readline()
        assert passed == [Moment.FORWARDING, Moment.FORWARDED, Moment.ACKING]
        assert proxy.ledger.acked == {17: ("ds.output.g.r.w0", digest(b"hello"))}


def test_messages_are_understood_however_they_are_cut() -> None:
    said = b"CONNECT {}\r\nHPUB ds.request.r i.1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n"
    said += b"PING\r\nPUB ds.walk.r 2\r\n\r\n\r\n"
    whole = list(Wire().feed(said))
    wire = Wire()
    assert [one for place in range(len(said)) for one in wire.feed(said[place : place + 1])] == whole
    assert whole == [([b"HPUB", b"ds.request.r", b"i.1"], b"hello"), ([b"PUB", b"ds.walk.r"], b"\r\n")]


def test_an_ack_that_the_log_does_not_keep_is_found() -> None:
    ledger = Ledger(acked={3: ("ds.walk.r", digest(b"a")), 4: ("ds.walk.r", digest(b"b"))})
    kept = [Record(3, "ds.walk.r", b"a"), Record(4, "ds.walk.r", b"b")]
    assert ledger.check(kept, 1) == []
    assert [one.kind for one in ledger.check(kept[:1], 1)] == ["acked-lost"]
    assert [one.kind for one in ledger.check([kept[0], Record(4, "ds.walk.r", b"c")], 1)] == ["acked-lost"]
    assert ledger.check(kept[:1], 5) == []
    assert ledger.check(kept[:1], 1, 1) == []


def test_a_refusal_is_no_ack() -> None:
    ledger = Ledger()
    account = ledger.connection()
    refusal = b'{"error":{"code":503},"stream":"DS_LOG","seq":0}'
    assert account.up(b"PUB ds.walk.r i.1 1\r\na\r\n") == 1
    assert account.down(b"MSG i.1 1 %d\r\n%s\r\n" % (len(refusal), refusal)) == 0
    assert not ledger.acked
