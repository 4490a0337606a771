"""The log on a real nats-server that dies, loses its stream, lacks a feature, or has slow readers."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from nats.aio.client import Client

from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.nats.durability import StreamPolicy
from shared.log.nats.jetstream import JetStreamLog, connect, provision
from shared.log.nats.private_server import NatsServer
from shared.log.port import LogRegressedError, LogUnavailableError, WrongLastSequenceError
from shared.subjects import Subjects
from tests.shared.log.admin import consumers_of, delete_stream, say
from tests.shared.log.contract import Watch, collect, datas, take
from tests.shared.log.delay import Delay

pytestmark = pytest.mark.processes


@pytest.fixture
async def server(tmp_path: Path, subjects: Subjects) -> AsyncIterator[NatsServer]:
    """A server for one test, which may kill it, with a provisioned stream."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    await provision(server.url, server.credentials, subjects)
    yield server
    server.kill()


async def _open(server: NatsServer, subjects: Subjects) -> JetStreamLog:
    return await connect(server.url, credentials=server.credentials, subjects=subjects, name="test")


# ---- a server that dies ---------------------------------------------------------------------------


async def test_kill_9_in_the_middle_of_posts_loses_nothing_acked_and_nothing_posted(
    server: NatsServer, subjects: Subjects
) -> None:
    rounds, posts = 5, 2_000
    writer, reader = await _open(server, subjects), await _open(server, subjects)
    acked: dict[int, bytes] = {}
    read: list[tuple[int, bytes]] = []
    wanted = {b"%d" % number for number in range(rounds * posts)}

    async def read_all() -> None:
        missing = set(wanted)
        async with aclosing(reader.read([subjects.walk("*")], 1)) as records:
            while missing:
                record = await anext(records)
                read.append((record.seq, record.data))
                missing.discard(record.data)

    async with asyncio.TaskGroup() as group:
        group.create_task(read_all())
        for turn in range(rounds):
            some_acked = asyncio.Event()
            for number in range(turn * posts, (turn + 1) * posts):

                def stored(seq: int, data: bytes = b"%d" % number, event: asyncio.Event = some_acked) -> None:
                    acked[seq] = data
                    event.set()

                writer.post(subjects.walk("r"), b"%d" % number, stored)
            await some_acked.wait()
            server.kill()  # with some acked, some on their way, some not sent
            server.start()
        await writer.drain()

    log = await _open(server, subjects)
    history = [(record.seq, record.data) for record in await collect(log.history([subjects.walk("*")]))]
    held = dict(history)
    assert len(acked) == rounds * posts
    assert {seq: held.get(seq) for seq in acked} == acked, "acked, but not in the log"
    assert set(held.values()) == wanted, "posted, but not in the log"
    assert read == history[: len(read)], "read in another order, twice, or with a hole"
    for open_log in (log, writer, reader):
        await open_log.close()


async def test_a_reader_that_had_read_nothing_yet_goes_on_from_where_it_began(
    server: NatsServer, subjects: Subjects
) -> None:
    log = await _open(server, subjects)
    for number in range(50):
        await log.publish(subjects.walk("old"), b"%d" % number)
    watch = Watch()
    log.on_change = watch
    async with aclosing(log.read([subjects.walk("*")], 51)) as records:
        first = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0)
        server.kill()
        await watch.until(connected=False)
        server.start()
        await log.publish(subjects.walk("new"), b"new")
        assert (await first).data == b"new"
    await log.close()


async def test_a_stopped_server_is_as_good_as_a_killed_one(server: NatsServer, subjects: Subjects) -> None:
    watch = Watch()
    log = await _open(server, subjects)
    log.on_change = watch
    async with aclosing(log.read([subjects.walk("*")], 1)) as records:
        for number in range(3):
            server.stop()
            await watch.until(connected=False)
            log.post(subjects.walk("r"), b"%d" % number)
            server.start()
            assert (await anext(records)).data == b"%d" % number
    await log.close()


async def test_an_error_line_of_the_server_does_not_end_the_connection_for_good(
    server: NatsServer, subjects: Subjects
) -> None:
    log = await _open(server, subjects)
    watch = Watch()
    log.on_change = watch
    await log._connection._process_err("'maximum connections exceeded'")
    await watch.until(connected=True)
    assert watch.changes == [False, True]
    assert await log.publish(subjects.walk("r"), b"1") == 1
    await log.close()


@pytest.mark.parametrize(
    "header",
    [
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 77\r\n\r\n",
        b"NATS/1.0 100 FlowControl Request\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0\r\nContent-Type: application/json\r\n\r\n",
        b"\r\n\r\n",
    ],
)
async def test_a_record_is_read_whatever_its_publisher_wrote_in_its_header(
    server: NatsServer, subjects: Subjects, header: bytes
) -> None:
    log = await _open(server, subjects)
    size = (len(header), len(header) + 4)
    await say(server, b"HPUB %s %d %d\r\n%sdata\r\n" % (subjects.request("r").encode(), *size, header))
    await log.publish(subjects.walk("r"), b"next")
    wanted = [subjects.request("*"), subjects.walk("*")]
    assert datas(await collect(log.history(wanted))) == [b"data", b"next"]
    assert datas(await take(log.read(wanted, 1), 2)) == [b"data", b"next"]
    await log.close()


@pytest.mark.parametrize(
    "token", [b"a\x0bb", b"a\x0cb", b"\x00", b"\xff", b"\xc2\xa0", b"*", b">", b"n" * 4000]
)
async def test_a_record_is_read_whatever_subject_its_publisher_chose(
    server: NatsServer, subjects: Subjects, token: bytes
) -> None:
    log = await _open(server, subjects)
    prefix = subjects.request("").encode()
    await say(server, b"PUB %s%s 4\r\ndata\r\n" % (prefix, token))
    header = b"NATS/1.0\r\nA: b\r\n\r\n"
    size = (len(header), len(header) + 4)
    await say(server, b"HPUB %s%s %d %d\r\n%sdata\r\n" % (prefix, token, *size, header))
    await log.publish(subjects.walk("r"), b"next")
    wanted = [subjects.request("*"), subjects.walk("*")]
    assert datas(await take(log.read(wanted, 1), 3)) == [b"data", b"data", b"next"]
    await log.close()


async def test_a_refused_condition_after_a_resend_is_no_error_when_the_first_copy_was_ours(
    server: NatsServer, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await _open(server, subjects)
    real_send = NatsConnection.send_publish

    def lose_the_ack(
        connection: NatsConnection, subject: str, reply: str, data: bytes, expected: int | None
    ) -> None:
        real_send(connection, subject, f"{reply}.lost" if expected is not None else reply, data, expected)

    with monkeypatch.context() as patch:
        patch.setattr(NatsConnection, "send_publish", lose_the_ack)
        ours = asyncio.ensure_future(log.publish(subjects.epoch, b"ours", expected_last_seq=0))
        theirs = asyncio.ensure_future(
            log.publish(subjects.conductor("other"), b"theirs", expected_last_seq=0)
        )
        wrong = asyncio.ensure_future(log.publish(subjects.conductor("third"), b"wrong", expected_last_seq=7))
        async with aclosing(log.read([subjects.conductor("*")], 1)) as records:
            await take(records, 2)  # stored, but not acked
    # Meanwhile somebody else writes on one of the two subjects: the answer is still right.
    other = await _open(server, subjects)
    await other.publish(subjects.epoch, b"a successor", expected_last_seq=1)
    server.kill()
    server.start()
    assert (await ours, await theirs) == (1, 2)
    with pytest.raises(WrongLastSequenceError):
        await wrong
    assert (await log.state()).last_seq == 3
    await log.close()
    await other.close()


async def test_a_condition_refused_for_a_publish_under_way_is_tried_again_when_that_comes_to_nothing(
    server: NatsServer, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await _open(server, subjects)
    with monkeypatch.context() as patch:  # the answer a replicated stream can give, and a single one never
        patch.setattr(NatsConnection, "send_publish", lambda *_: None)
        publishing = asyncio.ensure_future(log.publish(subjects.epoch, b"1", expected_last_seq=0))
        await asyncio.sleep(0)
        (number,) = log._outbox._entries
    subject = f"{log._ack_prefix}{number}".encode()
    log._on_ack(subject, b"", b'{"error":{"code":400,"err_code":10164,"description":"in flight"}}', None)
    assert await publishing == 1
    await log.close()


async def test_a_server_that_hangs_for_some_seconds_costs_some_seconds_and_nothing_else(
    server: NatsServer, subjects: Subjects
) -> None:
    log = await _open(server, subjects)
    watch = Watch()
    log.on_change = watch
    assert server.pid is not None
    async with aclosing(log.read([subjects.walk("*")], 1)) as records:
        assert await log.publish(subjects.walk("r"), b"before") == 1
        os.kill(server.pid, signal.SIGSTOP)
        for number in range(100):
            log.post(subjects.walk("r"), b"%d" % number)
        await watch.until(connected=False)  # by its silence: the connection is open
        os.kill(server.pid, signal.SIGCONT)
        await log.drain()
        assert await log.publish(subjects.walk("r"), b"after") > 100
        read = [await anext(records)]
        while read[-1].data != b"after":
            read.append(await anext(records))
    once = list(dict.fromkeys(datas(read)))  # what it had before it hung may be there twice
    assert once == [b"before", *(b"%d" % number for number in range(100)), b"after"]
    assert [record.seq for record in read] == list(range(1, len(read) + 1))
    await log.close()


async def test_a_slow_way_to_the_server_is_no_reason_to_leave_it(
    server: NatsServer, subjects: Subjects
) -> None:
    async with Delay(server.url, seconds=0.2) as slow:
        log = await connect(
            slow.url, credentials=server.credentials, subjects=subjects, name="far", timeout_s=10
        )
        watch = Watch()
        log.on_change = watch
        async with aclosing(log.read([subjects.walk("*")], 1)) as records:
            for number in range(1_000):
                log.post(subjects.walk("r"), b"%d" % number)
            read = await take(records, 1_000)
        await log.drain()
        assert datas(read) == [b"%d" % number for number in range(1_000)]
        assert (await log.state()).last_seq == 1_000, "sent again, though nothing was lost"
        assert watch.changes == []
        await log.close()


# ---- a log that is full -----------------------------------------------------------------------------


async def test_a_full_log_takes_events_again_once_its_oldest_have_left_it(
    server: NatsServer, subjects: Subjects
) -> None:
    bounded = StreamPolicy(max_bytes=100_000, max_age_s=1)
    await provision(server.url, server.credentials, subjects, bounded)
    log = await _open(server, subjects)
    for number in range(40):
        log.post(subjects.walk("r"), b"%d " % number + bytes(5_000))
    fullness = [log.is_full]
    while not fullness[-1]:
        await asyncio.sleep(0.01)
        fullness.append(log.is_full)
    held = (await log.state()).messages
    await log.drain()
    assert 0 < held < 40
    assert (await log.state()).last_seq == 40
    assert [*fullness[-1:], log.is_full] == [True, False]
    await log.close()


# ---- a log that is another --------------------------------------------------------------------------


async def test_a_stream_made_anew_under_a_living_connection_is_noticed(
    server: NatsServer, subjects: Subjects
) -> None:
    log = await _open(server, subjects)
    await log.publish(subjects.walk("r"), b"1")
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        await take(records, 1)
        await delete_stream(server, subjects.stream)
        await provision(server.url, server.credentials, subjects)
        with pytest.raises(LogRegressedError, match="recreated"):
            await anext(records)
    await log.close()


async def test_a_restored_copy_is_noticed_by_who_only_wrote(
    server: NatsServer, subjects: Subjects, tmp_path: Path
) -> None:
    log, watch = await _open(server, subjects), Watch()
    log.on_change = watch
    await log.publish(subjects.walk("r"), b"1")
    server.stop()
    _copy_tree(tmp_path / "nats" / "jetstream", tmp_path / "copy")
    server.start()
    await log.publish(subjects.walk("r"), b"2")
    server.stop()
    _copy_tree(tmp_path / "copy", tmp_path / "nats" / "jetstream")
    await _write_aside(tmp_path / "nats", subjects, b"another 2", b"another 3")
    server.start()
    with pytest.raises(LogRegressedError, match="has another event at 2 than before"):
        await log.publish(subjects.walk("r"), b"4")
    await log.close()


async def test_a_restored_copy_is_noticed_also_when_it_has_grown_as_far_again(
    server: NatsServer, subjects: Subjects, tmp_path: Path
) -> None:
    log, watch = await _open(server, subjects), Watch()
    log.on_change = watch
    await log.publish(subjects.walk("r"), b"1")
    server.stop()
    copy = tmp_path / "copy"
    _copy_tree(tmp_path / "nats" / "jetstream", copy)
    server.start()
    await log.publish(subjects.walk("r"), b"2")
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        await take(records, 2)
        server.stop()
        _copy_tree(copy, tmp_path / "nats" / "jetstream")
        await _write_aside(tmp_path / "nats", subjects, b"another 2", b"another 3")
        server.start()
        with pytest.raises(LogRegressedError, match="has another event at 2 than before"):
            await anext(records)
    await log.close()


async def test_a_log_that_lost_its_end_is_noticed(
    server: NatsServer, subjects: Subjects, tmp_path: Path
) -> None:
    log = await _open(server, subjects)
    await log.publish(subjects.walk("r"), b"1")
    server.stop()
    copy = tmp_path / "copy"
    _copy_tree(tmp_path / "nats" / "jetstream", copy)
    server.start()
    await log.publish(subjects.walk("r"), b"2")
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        await take(records, 2)
        server.stop()
        _copy_tree(copy, tmp_path / "nats" / "jetstream")
        server.start()
        with pytest.raises(LogRegressedError, match="ends at 1, had reached 2"):
            await anext(records)
    await log.close()


async def _write_aside(folder: Path, subjects: Subjects, *datas: bytes) -> None:
    """On another port, so that the clients see the server only after it has grown."""
    aside = NatsServer(folder)
    aside.start()
    log = await _open(aside, subjects)
    for data in datas:
        await log.publish(subjects.walk("r"), data)
    await log.close()
    aside.stop()


def _copy_tree(source: Path, target: Path) -> None:
    if target.exists():
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    for path in source.rglob("*"):
        there = target / path.relative_to(source)
        if path.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(path.read_bytes())


# ---- readers ----------------------------------------------------------------------------------------


async def test_a_slow_reader_overflows_its_queue_and_loses_nothing(
    server: NatsServer, subjects: Subjects
) -> None:
    log = await connect(
        server.url, credentials=server.credentials, subjects=subjects, name="slow", max_pending=10
    )
    for number in range(1_000):
        log.post(subjects.walk("r"), b"%d" % number)
    await log.drain()
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        read = await take(records, 1_000)
    assert datas(read) == [b"%d" % number for number in range(1_000)]
    await log.close()


async def test_the_log_waits_for_a_reader_that_does_not_take(server: NatsServer, subjects: Subjects) -> None:
    log = await _open(server, subjects)
    for number in range(100):
        log.post(subjects.walk("r"), number.to_bytes(4, "big") + bytes(100_000))
    await log.drain()
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        await take(records, 1)
        for _ in range(100):  # round trips in which the server would have sent it all
            await log.state()
        (cursor,) = log._cursors
        assert cursor.position < 100, "the server's window did not close"
        read = await take(records, 99)
        assert int.from_bytes(read[-1].data[:4], "big") == 99
        assert cursor.fault is None
    await log.close()


async def test_a_closed_reader_leaves_no_consumer_behind(server: NatsServer, subjects: Subjects) -> None:
    log = await _open(server, subjects)
    await log.publish(subjects.walk("r"), b"1")
    async with aclosing(log.read([subjects.walk("r")], 1)) as records:
        await take(records, 1)
        assert await consumers_of(server, subjects.stream) == 1
    assert len(await collect(log.history([subjects.walk("r")]))) == 1
    await log.state()
    assert await consumers_of(server, subjects.stream) == 0
    await log.close()


# ---- a log that is not there ------------------------------------------------------------------------


def _unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_an_unreachable_server_is_one_clear_line(subjects: Subjects) -> None:
    url = f"nats://user:secret@127.0.0.1:{_unused_port()}"
    for attempt in (
        connect(url, subjects=subjects, name="test"),
        connect(url, subjects=subjects, name="test", timeout_s=0.2),
    ):
        with pytest.raises(LogUnavailableError, match="cannot be reached") as caught:
            await attempt
        assert "\n" not in caught.value.message
        assert "secret" not in caught.value.message
    with pytest.raises(LogUnavailableError, match="cannot be reached"):
        await provision(url, ANONYMOUS, subjects)


async def test_a_server_that_comes_late_is_waited_for(tmp_path: Path, subjects: Subjects) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    server.stop()
    waiting = asyncio.ensure_future(
        connect(server.url, credentials=server.credentials, subjects=subjects, name="early", timeout_s=20)
    )
    await asyncio.sleep(0)
    server.start()
    await provision(server.url, server.credentials, subjects)
    log = await waiting
    assert log.connected
    await log.close()
    server.stop()


@pytest.mark.parametrize("is_there", [True, False])
async def test_who_is_told_to_end_while_connecting_ends_though_the_library_forgets_it(
    server: NatsServer, subjects: Subjects, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    entered = asyncio.Event()
    select = Client._select_next_server  # the first thing that connecting waits in

    async def forgetful(client: Client) -> None:
        """Swallow a cancellation as `asyncio.wait_for` did before Python 3.12."""
        entered.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await select(client)

    monkeypatch.setattr(Client, "_select_next_server", forgetful)
    url = server.url if is_there else f"nats://127.0.0.1:{_unused_port()}"
    connecting = asyncio.ensure_future(
        connect(url, credentials=server.credentials, subjects=subjects, name="told")
    )
    await entered.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_a_wrong_token_is_one_clear_line(server: NatsServer, subjects: Subjects) -> None:
    for token in ("wrong", None):
        with pytest.raises(LogUnavailableError, match=r"refused the token: .* DALSEGNO_NATS_TOKEN"):
            await connect(
                server.url, credentials=Credentials(token=token), subjects=subjects, name="test", timeout_s=20
            )
        with pytest.raises(LogUnavailableError, match=r"refused the token: .* DALSEGNO_NATS_TOKEN"):
            await provision(server.url, Credentials(token=token), subjects)


async def test_a_wrong_token_is_never_taken_for_a_server_that_is_away(
    server: NatsServer, subjects: Subjects
) -> None:
    """The server closes right after its error line; in one case of sixty a reset arrives first."""
    for _ in range(300):
        with pytest.raises(LogUnavailableError, match="refused the token"):
            await connect(server.url, credentials=Credentials(token="wrong"), subjects=subjects, name="test")


async def test_a_server_without_jetstream_is_one_clear_line(tmp_path: Path, subjects: Subjects) -> None:
    server = NatsServer(tmp_path / "nats", jetstream=False)
    server.start()
    with pytest.raises(LogUnavailableError, match="no JetStream"):
        await connect(server.url, credentials=server.credentials, subjects=subjects, name="test")
    with pytest.raises(LogUnavailableError, match="no JetStream"):
        await provision(server.url, server.credentials, subjects)
    server.stop()


async def test_a_missing_stream_says_how_to_make_it(nats_server: NatsServer, subjects: Subjects) -> None:
    told = f"dalsegno provision --nats {nats_server.url} --prefix {subjects.prefix}`"
    with pytest.raises(LogUnavailableError, match=told):
        await connect(nats_server.url, credentials=nats_server.credentials, subjects=subjects, name="test")


async def test_a_server_that_is_none_is_one_clear_line(subjects: Subjects) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as stranger:
        port = stranger.sockets[0].getsockname()[1]
        with pytest.raises(LogUnavailableError, match="cannot be reached"):
            await connect(f"nats://127.0.0.1:{port}", subjects=subjects, name="test")


# ---- provisioning -----------------------------------------------------------------------------------


async def test_any_number_may_provision_at_once(nats_server: NatsServer, subjects: Subjects) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(
                provision(
                    nats_server.url,
                    nats_server.credentials,
                    subjects,
                    StreamPolicy(max_bytes=1_000_000 * (1 + number % 2)),
                )
            )
    log = await _open(nats_server, subjects)
    assert await log.publish(subjects.walk("r"), b"1") == 1
    await provision(nats_server.url, nats_server.credentials, subjects)
    assert (await log.state()).last_seq == 1, "provisioning again keeps what is there"
    await log.close()


async def test_subjects_of_another_stream_are_refused_with_the_reason(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    await provision(nats_server.url, nats_server.credentials, subjects)
    same_subjects = type("Other", (Subjects,), {"stream": f"{subjects.prefix.upper()}_OTHER"})(
        subjects.prefix
    )
    with pytest.raises(LogUnavailableError, match="overlap"):
        await provision(nats_server.url, nats_server.credentials, same_subjects)
