"""The log on a cluster of three servers satisfies the contract; and faults that only a cluster has."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial

import nats
import pytest

from shared.log.nats.durability import StreamPolicy
from shared.log.nats.jetstream import JetStreamLog, connect, provision
from shared.log.port import LogUnavailableError, StoredRecord, WrongLastSequenceError
from shared.subjects import Subjects
from tests.chaos.proxy import Proxy
from tests.shared.log.cluster import HOST, Cluster, Member, running
from tests.shared.log.contract import LogContract, collect, datas, take

pytestmark = pytest.mark.processes


R3 = StreamPolicy(durability="cluster")
_END = b"end"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Clients learn only of the server behind the proxy."""
    with running(tmp_path_factory.mktemp("cluster"), advertises=False) as cluster:
        yield cluster


class _R3Deployment:
    """One stream per test on a shared cluster; being away means being cut off from it."""

    def __init__(self, subjects: Subjects, cluster: Cluster, proxy: Proxy) -> None:
        self.subjects = subjects
        self.logs: list[JetStreamLog] = []
        self._cluster = cluster
        self._proxy = proxy

    async def open(self, on_change: Callable[[bool], None] | None = None) -> JetStreamLog:
        log = await connect(
            f"nats://{HOST}:{self._proxy.port}",
            credentials=self._cluster.credentials,
            subjects=self.subjects,
            name="test",
            durability="cluster",
            on_change=on_change,
        )
        self.logs.append(log)
        return log

    async def provide(self, max_bytes: int | None = None) -> None:
        keeping = StreamPolicy(durability="cluster", max_bytes=max_bytes)
        await provision(self._cluster.url, self._cluster.credentials, self.subjects, keeping, timeout_s=20)

    async def can_be_written_to(self) -> None:
        """Wait until the server behind the proxy knows the leader, or the first events change order."""
        log = await self.open()
        with pytest.raises(WrongLastSequenceError):
            await log.publish(self.subjects.epoch, b"never stored", expected_last_seq=10**9)
        await log.close()

    async def stop(self) -> None:
        self._proxy.cut()

    async def start(self) -> None:
        self._proxy.heal()

    async def recreate(self) -> None:
        await self.remove()
        await self.provide()
        self._proxy.heal()

    async def remove(self) -> None:
        client = await nats.connect(self._cluster.url.split(","), token=self._cluster.credentials.token)
        await client.jetstream().delete_stream(self.subjects.stream)
        await client.close()

    async def fill(self) -> None:
        log = await self.open()
        await log.publish(self.subjects.walk("filler"), bytes(4096))
        await self.provide(max_bytes=(await log.state()).bytes + 1)

    async def set_max_messages(self) -> None:
        await self.provide(max_bytes=None)


@pytest.fixture
async def deployment(subjects: Subjects, cluster: Cluster) -> AsyncIterator[_R3Deployment]:
    async with Proxy(cluster.members[0].port) as proxy:
        deployment = _R3Deployment(subjects, cluster, proxy)
        await deployment.provide()
        await deployment.can_be_written_to()
        yield deployment
        proxy.heal()
        for log in deployment.logs:
            await log.close()
        await deployment.remove()


class TestJetStreamLogOfThree(LogContract):
    pass


@pytest.fixture(scope="module")
def all_of_open_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("open")) as cluster:
        yield cluster


@pytest.fixture
def open_cluster(all_of_open_cluster: Cluster) -> Cluster:
    """A running cluster whose servers announce one another; tests kill and stop them."""
    for member in all_of_open_cluster.members:
        member.wake()
    all_of_open_cluster.start()
    return all_of_open_cluster


@pytest.mark.parametrize("end", [Member.kill, Member.hang])
async def test_a_server_that_dies_or_hangs_is_left_for_another_that_it_told_of(
    open_cluster: Cluster, subjects: Subjects, end: Callable[[Member], None]
) -> None:
    await provision(open_cluster.url, open_cluster.credentials, subjects, R3, timeout_s=20)
    leader = await open_cluster.leader(subjects.stream)
    near = next(member for member in open_cluster.members if member is not leader)
    log = await connect(near.url, credentials=open_cluster.credentials, subjects=subjects, name="test")
    assert log._connection.server_name == near.name
    async with aclosing(log.read([subjects.walk("*")], 1)) as records:
        assert await log.publish(subjects.walk("r"), b"1") == 1
        end(near)
        begun_s = time.monotonic()
        # It may have been stored by the server as it hung: then that copy is the one.
        assert await log.publish(subjects.walk("r"), b"2", expected_last_seq=1) == 2
        print(f"{end.__name__}: elsewhere after {time.monotonic() - begun_s:.3f} s")
        assert datas(await take(records, 2)) == [b"1", b"2"]
    while log._connection.server_name == near.name:  # it acked just before its end
        await log.publish(subjects.walk("r"), b"3")
    await log.close()


async def test_of_several_servers_one_that_is_there_is_enough(
    open_cluster: Cluster, subjects: Subjects
) -> None:
    await provision(open_cluster.url, open_cluster.credentials, subjects, R3, timeout_s=20)
    urls = f"nats://{HOST}:1,{open_cluster.members[0].url},nats://{HOST}:2"
    for _ in range(5):  # in whatever order they are tried
        log = await connect(urls, credentials=open_cluster.credentials, subjects=subjects, name="test")
        await log.close()
    with pytest.raises(
        LogUnavailableError, match=r"NATS at 127\.0\.0\.1:1 or 127\.0\.0\.1:2 cannot be reached"
    ):
        await connect(f"nats://{HOST}:1,nats://{HOST}:2", subjects=subjects, name="test")


async def test_nothing_acked_is_lost_when_leaders_die_and_hang_under_load(
    open_cluster: Cluster, subjects: Subjects
) -> None:
    load = await _Load.on(open_cluster, subjects)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(load.read())
        writing = [tasks.create_task(load.post()), tasks.create_task(load.publish_in_turn())]
        for end, begin in ((Member.kill, Member.start), (Member.hang, Member.wake)):
            await open_cluster.in_step(subjects.stream)
            await load.goes_on()
            leader = await open_cluster.leader(subjects.stream)
            end(leader)
            await load.goes_on()
            begin(leader)
            await load.goes_on()
        load.enough.set()
        await asyncio.wait(writing)
        await load.end()
        await reading

    log = await connect(
        open_cluster.url,
        credentials=open_cluster.credentials,
        subjects=subjects,
        name="checker",
        timeout_s=20,
    )
    history = await collect(log.history([subjects.walk("*"), subjects.epoch]))
    held = {record.seq: record.data for record in history}
    assert {seq: held.get(seq) for seq in load.acked} == load.acked, "acked, but not in the log"
    posted = {record.data for record in history if record.subject != subjects.epoch}
    assert posted == load.posted, "posted, but not in the log"
    in_turn = [record.data for record in history if record.subject == subjects.epoch]
    assert in_turn == [b"%d" % number for number in range(len(in_turn))], "one of them twice, or missing"
    # Duplicates may follow, from a server that hung and then forwarded its messages.
    assert load.read_records == history[: len(load.read_records)], "read in another order, or with a hole"
    await log.close()
    await load.close()


class _Load:
    """Posted events, events that each expect the previous one, and a reader of both."""

    def __init__(self, subjects: Subjects, logs: list[JetStreamLog]) -> None:
        self.subjects = subjects
        self.acked: dict[int, bytes] = {}
        self.posted: set[bytes] = set()
        self.read_records: list[StoredRecord] = []
        self.enough = asyncio.Event()
        self._writer, self._chain, self._reader = logs
        self._progress = asyncio.Event()

    @classmethod
    async def on(cls, cluster: Cluster, subjects: Subjects) -> "_Load":
        await provision(cluster.url, cluster.credentials, subjects, R3, timeout_s=20)
        logs = [
            # Each knows one server, and learns of the others from it.
            await connect(
                member.url, credentials=cluster.credentials, subjects=subjects, name=name, timeout_s=20
            )
            for name, member in zip(("writer", "chain", "reader"), cluster.members, strict=True)
        ]
        return cls(subjects, logs)

    async def post(self) -> None:
        number = 0
        while not self.enough.is_set():
            for _ in range(20):
                data = b"%d" % number
                self.posted.add(data)
                self._writer.post(self.subjects.walk("r"), data, partial(self._stored, data))
                number += 1
            await asyncio.sleep(0.01)  # some 2,000 a second
        await self._writer.drain()

    async def publish_in_turn(self) -> None:
        number, seq = 0, 0
        while not self.enough.is_set():
            data = b"%d" % number
            seq = await self._chain.publish(self.subjects.epoch, data, expected_last_seq=seq)
            self.acked[seq] = data
            number += 1

    async def read(self) -> None:
        wanted = [self.subjects.walk("*"), self.subjects.epoch]
        async with aclosing(self._reader.read(wanted, 1)) as records:
            async for record in records:
                self.read_records.append(record)
                self._progress.set()
                if record.data == _END:
                    break

    async def goes_on(self) -> None:
        """Wait until later events have been read."""
        beyond = max(self.acked, default=0) + 500
        while not self.read_records or self.read_records[-1].seq < beyond:
            self._progress.clear()
            await self._progress.wait()

    async def end(self) -> None:
        """Publish the last event."""
        self.posted.add(_END)
        await self._writer.publish(self.subjects.walk("r"), _END)

    async def close(self) -> None:
        for log in (self._writer, self._chain, self._reader):
            await log.close()

    def _stored(self, data: bytes, seq: int) -> None:
        self.acked[seq] = data
