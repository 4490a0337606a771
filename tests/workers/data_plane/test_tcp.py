"""TCP: real sockets, and real processes where one is stopped or killed."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec
import pytest

from shared.errors import TensorGone
from tests.workers.data_plane.contract import ProcessContract, TransportContract, folder
from tests.workers.data_plane.sources import FreshMemory, HandMadeSource
from workers.data_plane.transport import Locator, Peer, TransportError
from workers.data_plane.transports import tcp_frames as frames
from workers.data_plane.transports import tcp_server
from workers.data_plane.transports.endpoints import own_network
from workers.data_plane.transports.tcp import TcpEndpoint, TcpTransport
from workers.data_plane.transports.tcp_frames import Request, Status

pytestmark = pytest.mark.processes


MB: Final = 1024 * 1024
LONG: Final = frames.WHOLE_BYTES + 1
__all__ = ["folder"]


class TestTcp(TransportContract, ProcessContract):
    kind = "tcp"


@pytest.fixture
def source() -> Iterator[HandMadeSource]:
    source = HandMadeSource()
    yield source
    source.close()


@pytest.fixture
async def owner(source: HandMadeSource) -> AsyncIterator[TcpTransport]:
    transport = TcpTransport(source, FreshMemory())
    yield transport
    await transport.close()


@pytest.fixture
async def reader() -> AsyncIterator[TcpTransport]:
    source = HandMadeSource(MB)
    transport = TcpTransport(source, FreshMemory(), stalled_s=0.2)
    yield transport
    await transport.close()
    source.close()


def peer_of(transport: TcpTransport, rank: int = 1) -> Peer:
    return Peer(rank, 7, transport.endpoint())


def card_of(transport: TcpTransport) -> TcpEndpoint:
    return msgspec.msgpack.decode(transport.endpoint(), type=TcpEndpoint)


def other_card(transport: TcpTransport, **fields: object) -> Peer:
    return Peer(1, 7, msgspec.msgpack.encode(msgspec.structs.replace(card_of(transport), **fields)))


# ---- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, frames.WHOLE_BYTES, LONG, 5 * MB + 3])
async def test_a_tensor_comes_over_as_it_is(
    nbytes: int, source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    at = source.put(data)

    found = await reader.fetch(peer_of(owner), at)

    assert found.tobytes() == data
    assert not found.flags.writeable
    reader.check(peer_of(owner), at)


async def test_many_at_once_share_a_few_connections(
    source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    tensors = [bytes([number]) * (number * 500) for number in range(1, 200)]
    places = [source.put(tensor) for tensor in tensors]

    async with asyncio.TaskGroup() as tasks:
        fetches = [tasks.create_task(reader.fetch(peer_of(owner), at)) for at in places]

    assert [fetch.result().tobytes() for fetch in fetches] == tensors
    assert 1 <= owner.server.connections <= 4


async def test_a_fetched_tensor_stays_when_its_slot_is_freed(
    source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"a" * LONG)
    found = await reader.fetch(peer_of(owner), at)
    source.replace(at, 0)

    assert found.tobytes() == b"a" * LONG


async def test_a_fetch_that_is_cancelled_takes_no_other_with_it(
    source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"a" * 4 * MB)
    fetch = asyncio.ensure_future(reader.fetch(peer_of(owner), at))
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch

    assert (await reader.fetch(peer_of(owner), at)).tobytes() == b"a" * 4 * MB


async def test_a_connection_the_peer_has_closed_is_made_again(
    source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"abc")
    await reader.fetch(peer_of(owner), at)
    for connection in list(owner.server._connections):
        tcp_server.shut(connection)

    assert (await reader.fetch(peer_of(owner), at)).tobytes() == b"abc"


# ---- gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [100, LONG])
async def test_a_tensor_of_an_earlier_generation_is_gone(
    nbytes: int, source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"a" * nbytes)
    now = source.replace(at, ord("b"))

    with pytest.raises(TensorGone, match="stale"):
        await reader.fetch(peer_of(owner), at)
    assert (await reader.fetch(peer_of(owner), now)).tobytes() == b"b" * nbytes
    assert owner.server.connections == 1
    assert owner.refused == 0


@pytest.mark.parametrize("nbytes", [100, LONG])
async def test_a_slot_that_is_freed_while_it_is_read_is_gone(
    nbytes: int, source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"a" * nbytes)
    looks = 0

    def free_behind_the_first_look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            source.replace(at, ord("b"))

    source.on_slot = free_behind_the_first_look

    with pytest.raises(TensorGone, match="stale"):
        await reader.fetch(peer_of(owner), at)


def test_bytes_sent_are_still_the_arenas_so_the_reader_asks_when_it_has_them(
    source: HandMadeSource, owner: TcpTransport
) -> None:
    at = source.put(b"a" * LONG)
    with raw(owner) as connection:
        connection.sendall(asking(owner, at))
        whole = frames.REPLY_BYTES + LONG
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * whole)
        connection.recv(whole, socket.MSG_PEEK | socket.MSG_WAITALL)  # all of it has been sent
        source.replace(at, ord("b"))
        got = received(connection, whole)
        connection.sendall(asking(owner, at, frames.CHECK))
        answer = frames.unpack_reply(received(connection, frames.REPLY_BYTES))

    assert frames.unpack_reply(got[: frames.REPLY_BYTES]) == (Status.HELD, LONG)
    assert b"b" in got[frames.REPLY_BYTES :], "sendfile copies nowadays: the second question can go"
    assert answer == (Status.STALE, 0)


@pytest.mark.parametrize("nbytes", [4096, MB])
async def test_whatever_the_owner_writes_meanwhile_a_read_is_one_tensor_or_none(
    nbytes: int, source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    current = source.put(b"\0" * nbytes)
    done = threading.Event()

    def write() -> None:
        nonlocal current
        while not done.is_set():
            current = source.replace(current, (source._generation + 1) % 251)

    writer = threading.Thread(target=write)
    writer.start()
    gone = read = 0
    try:
        for _ in range(60):
            at = current
            try:
                found = await reader.fetch(peer_of(owner), at)
            except TensorGone:
                gone += 1
            else:
                read += 1
                assert (found == (at.generation % 251 if at.generation > 1 else 0)).all()
    finally:
        done.set()
        writer.join()
    current = source.replace(current, 9)

    assert gone > 0
    assert (await reader.fetch(peer_of(owner), current)).tobytes() == b"\x09" * nbytes


# ---- refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (Status.WRONG_TOKEN, lambda request: request._replace(token=bytes(32))),
        (Status.OUT_OF_RANGE, lambda request: moved(request, segment=1)),
        (Status.OUT_OF_RANGE, lambda request: moved(request, offset=2**64 - 1)),
        (Status.OUT_OF_RANGE, lambda request: moved(request, nbytes=2**63)),
        (Status.WRONG_LENGTH, lambda request: moved(request, nbytes=1001)),
        (Status.WRONG_LENGTH, lambda request: moved(request, nbytes=999)),
        (Status.MALFORMED, lambda request: request._replace(verb=b"GET ")),
    ],
)
async def test_what_nobody_of_ours_would_ask_is_refused_counted_and_logged(
    status: Status,
    change: Callable[[Request], Request],
    source: HandMadeSource,
    owner: TcpTransport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = source.put(b"s" * 1000)
    asked = change(Request(frames.READ, at, owner.server.token))
    with raw(owner) as connection:
        connection.sendall(frames.pack_request(asked))
        answer = received(connection, frames.REPLY_BYTES)
        rest = connection.recv(1)

    assert frames.unpack_reply(answer) == (status, 0)
    assert rest == b"", "the connection is closed, and no byte of the tensor came"
    assert owner.server.refused == {status.name.lower(): 1}
    assert owner.refused == 1
    assert status.name.lower().replace("_", " ") in caplog.text
    assert owner.server.token.hex() not in caplog.text


async def test_a_refused_reader_is_told_by_type(
    source: HandMadeSource, owner: TcpTransport, reader: TcpTransport
) -> None:
    at = source.put(b"s" * 1000)

    with pytest.raises(TransportError, match="wrong token"):
        await reader.fetch(other_card(owner, token=bytes(32)), at)
    for bad in (
        Locator(0, at.offset, 1001, at.generation),
        Locator(9, 0, 1, 1),
        Locator(0, 2**40, 1, at.generation),
    ):
        with pytest.raises(TensorGone, match=r"wrong length|out of range"):
            await reader.fetch(peer_of(owner, rank=2), bad)
    with pytest.raises(TensorGone, match="cannot be asked for"):
        await reader.fetch(peer_of(owner, rank=2), Locator(0, -1, 1, 1))
    assert (await reader.fetch(peer_of(owner, rank=2), at)).tobytes() == b"s" * 1000


def test_a_flood_of_refusals_is_no_flood_of_lines(
    owner: TcpTransport, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with raw(owner) as connection:
            connection.sendall(b"x" * 64)
            received(connection, frames.REPLY_BYTES)

    assert owner.server.refused == {"malformed": 20}
    assert [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)] == [
        1,
        2,
        4,
        8,
        16,
    ]


def _peer_at(server: tcp_server.TcpServer) -> Peer:
    where, port = server.address
    return Peer(1, 7, msgspec.msgpack.encode(TcpEndpoint(where, port, server.token, own_network())))


async def test_connections_are_bounded(source: HandMadeSource, reader: TcpTransport) -> None:
    at = source.put(b"abc")
    server = tcp_server.TcpServer(source, address="127.0.0.1", port=0, max_connections=1)
    try:
        with socket.create_connection(server.address) as first:
            first.sendall(frames.pack_request(Request(frames.READ, at, server.token)))
            assert received(first, frames.REPLY_BYTES + 3)[-3:] == b"abc"
            with pytest.raises(TransportError):
                await reader.fetch(_peer_at(server), at)
        assert server.refused == {"busy": 1}
    finally:
        server.close()


async def test_strangers_keep_no_reader_out(source: HandMadeSource, reader: TcpTransport) -> None:
    at = source.put(b"abc")
    server = tcp_server.TcpServer(source, address="127.0.0.1", port=0, max_connections=2)
    try:
        with (
            socket.create_connection(server.address, timeout=5) as first,
            socket.create_connection(server.address, timeout=5) as second,
        ):
            second.sendall(frames.READ)
            assert (await reader.fetch(_peer_at(server), at)).tobytes() == b"abc"
            assert first.recv(1) == b""
            assert server.refused == {"silent": 1}
    finally:
        server.close()


async def test_a_reader_at_rest_gives_its_place_to_another_and_comes_back(
    source: HandMadeSource, reader: TcpTransport, owner: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "_RESTS_S", 0.0)
    at = source.put(b"a" * LONG)
    server = tcp_server.TcpServer(source, address="127.0.0.1", port=0, max_connections=1)
    try:
        for who in (reader, owner, reader, owner):
            assert (await who.fetch(_peer_at(server), at)).tobytes() == b"a" * LONG
            # Until the one that gave its place has ended, too: as many as the limit may be about to end.
            while not server._resting or server.connections > 1:  # noqa: ASYNC110 - threads, without an event
                await asyncio.sleep(0)
        assert server.refused == {}
    finally:
        server.close()


async def test_where_no_thread_is_to_be_had_the_next_one_may_get_one(
    source: HandMadeSource, reader: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "tcp-serve":
            raise RuntimeError("can't start new thread")
        real_start(thread)

    real_start = threading.Thread.start
    at = source.put(b"abc")
    server = tcp_server.TcpServer(source, address="127.0.0.1", port=0)
    try:
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", start)
            with pytest.raises(TransportError):
                await reader.fetch(_peer_at(server), at)
        assert server.refused == {"busy": 1}
        assert server.connections == 0
        assert (await reader.fetch(_peer_at(server), at)).tobytes() == b"abc"
    finally:
        server.close()


def test_a_stranger_that_says_nothing_is_let_go(
    source: HandMadeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "_FIRST_REQUEST_S", 0.05)
    server = tcp_server.TcpServer(source, address="127.0.0.1", port=0)
    try:
        with socket.create_connection(server.address, timeout=5) as silent:
            assert silent.recv(1) == b""
    finally:
        server.close()


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", ""])
def test_it_listens_on_one_address_only(everywhere: str, source: HandMadeSource) -> None:
    with pytest.raises(ValueError, match="expected the one by which other workers reach it"):
        TcpTransport(source, FreshMemory(), address=everywhere)


async def test_a_port_can_be_chosen_and_the_card_says_it(source: HandMadeSource) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    transport = TcpTransport(source, FreshMemory(), address="127.0.0.1", port=port)
    try:
        assert (card_of(transport).address, card_of(transport).port) == ("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"):
            TcpTransport(source, FreshMemory(), address="127.0.0.1", port=port)
    finally:
        await transport.close()


def test_a_card_says_whether_it_is_worth_trying(owner: TcpTransport, reader: TcpTransport) -> None:
    assert reader.reaches(peer_of(owner))
    assert not reader.reaches(other_card(owner, network="another machine's"))
    assert reader.reaches(other_card(owner, address="192.0.2.1", network="another machine's"))
    assert not reader.reaches(Peer(1, 7, b"\xc1"))
    assert not reader.reaches(other_card(owner, address="no address"))


def test_each_life_has_a_token_of_its_own(owner: TcpTransport, reader: TcpTransport) -> None:
    assert owner.server.token != reader.server.token
    assert len(owner.server.token) == 32


# ---- dead peers ----------------------------------------------------------------------------------------


def _serve_until_killed(pipe: Connection, port: int) -> None:
    source = HandMadeSource()
    transport = TcpTransport(source, FreshMemory(), port=port)
    pipe.send((transport.endpoint(), msgspec.msgpack.encode(source.put(b"p" * 8 * MB))))
    pipe.recv()


@contextmanager
def serving_process(port: int = 0) -> Iterator[tuple[int, Peer, Locator]]:
    """Another worker, as far as a reader can tell: its process id, its life, a tensor."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_until_killed, args=(there, port), daemon=True)
    process.start()
    endpoint, locator = here.recv()
    assert process.pid is not None
    try:
        yield process.pid, Peer(1, 7, endpoint), msgspec.msgpack.decode(locator, type=Locator)
    finally:
        process.kill()
        process.join()


async def test_a_peer_that_dies_is_told_at_once_before_during_and_after_a_read(reader: TcpTransport) -> None:
    with serving_process() as (pid, peer, at):
        found = await reader.fetch(peer, at)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"no byte came for 0\.2 s"):
            await reader.fetch(peer, at)
        waiting = asyncio.ensure_future(reader.fetch(peer, at))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TransportError):
            await waiting
        with pytest.raises(TransportError):
            await reader.fetch(peer, at)

    assert time.monotonic() - began < 3
    assert found.tobytes() == b"p" * 8 * MB, "what was read before stays"


async def test_another_life_at_the_same_place_is_not_read_for_the_former(
    source: HandMadeSource, reader: TcpTransport
) -> None:
    at = source.put(b"former")
    former = TcpTransport(source, FreshMemory())
    peer = peer_of(former)
    await reader.fetch(peer, at)
    await former.close()
    now = TcpTransport(source, FreshMemory(), port=card_of(former).port)
    try:
        with pytest.raises(TransportError, match="wrong token"):
            await reader.fetch(peer, at)
    finally:
        await now.close()


async def test_a_peer_that_is_forgotten_wakes_who_waits_for_it(source: HandMadeSource) -> None:
    reader = TcpTransport(source, FreshMemory())
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where, port = mute.getsockname()
        peer = Peer(1, 7, msgspec.msgpack.encode(TcpEndpoint(where, port, bytes(32), "")))
        waiting = asyncio.ensure_future(reader.fetch(peer, Locator(0, 0, 8, 1)))
        connection, _ = await asyncio.to_thread(mute.accept)
        with connection:
            await asyncio.to_thread(received, connection, frames.REQUEST_BYTES)
            reader.forget(peer)
            with pytest.raises(TransportError):
                await waiting
    await reader.close()


async def test_who_stands_in_line_for_a_peer_that_stalls_does_not_wait_in_turn(reader: TcpTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where, port = silent.getsockname()
        peer = Peer(1, 7, msgspec.msgpack.encode(TcpEndpoint(where, port, b"", own_network())))
        at = Locator(0, 0, 16, 1)

        async def fail() -> None:
            with pytest.raises(TransportError, match="no byte came"):
                await reader.fetch(peer, at)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(12):
                tasks.create_task(fail())

        silent.setblocking(False)
        came = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                came += 1
        assert came == 4


async def test_half_a_tensor_is_none(source: HandMadeSource) -> None:
    reader = TcpTransport(source, FreshMemory())

    def send_half(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            received(connection, frames.REQUEST_BYTES)
            connection.sendall(frames.pack_reply(Status.HELD, MB) + bytes(MB // 2))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where, port = listener.getsockname()
        peer = Peer(1, 7, msgspec.msgpack.encode(TcpEndpoint(where, port, bytes(32), "")))
        sender = threading.Thread(target=send_half, args=(listener,))
        sender.start()
        with pytest.raises(TransportError, match="too early"):
            await reader.fetch(peer, Locator(0, 0, MB, 1))
        sender.join()
    await reader.close()


# ---- the end -------------------------------------------------------------------------------------------


async def test_nothing_is_left_of_it_once_it_is_closed() -> None:
    source = HandMadeSource(MB)
    at = source.put(b"abc")
    descriptors = open_descriptors()
    owner, reader = TcpTransport(source, FreshMemory()), TcpTransport(source, FreshMemory())
    await reader.fetch(peer_of(owner), at)
    await owner.close()
    with pytest.raises(TransportError):
        await reader.fetch(peer_of(owner), at)
    await reader.close()
    await reader.close()

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tcp-")]
    assert open_descriptors() == descriptors
    source.close()


def test_a_reader_that_goes_away_in_the_middle_is_no_news(
    source: HandMadeSource, owner: TcpTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    at = source.put(b"a" * 12 * MB)
    with raw(owner) as connection:
        connection.sendall(asking(owner, at))
        received(connection, 100)
    threads = [thread for thread in threading.enumerate() if thread.name == "tcp-serve"]
    for thread in threads:
        thread.join(5)

    assert owner.server.connections == 0
    assert owner.refused == 0
    assert caplog.text == ""


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---- raw sockets ---------------------------------------------------------------------------------------


@contextmanager
def raw(owner: TcpTransport) -> Iterator[socket.socket]:
    with socket.create_connection(owner.server.address, timeout=5) as connection:
        yield connection


def asking(owner: TcpTransport, at: Locator, verb: bytes = frames.READ) -> bytes:
    return frames.pack_request(Request(verb, at, owner.server.token))


def moved(request: Request, **fields: int) -> Request:
    return request._replace(locator=msgspec.structs.replace(request.locator, **fields))


def received(connection: socket.socket, nbytes: int) -> bytes:
    got = bytearray(nbytes)
    view = memoryview(got)
    while view:
        count = connection.recv_into(view)
        assert count, f"the connection ended {len(view)} bytes too early"
        view = view[count:]
    return bytes(got)
