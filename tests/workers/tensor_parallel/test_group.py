"""Members of a shared copy find one another over a log in memory, and are told that one is gone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import msgspec
import pytest

from configs.deployment import ConfigError, DataPlaneSettings, DeploymentConfig, NodeGroup
from models import registry
from shared.events import WorkerJoined, encode
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from tests.workers import harness
from tests.workers.harness import SUBJECTS
from workers.kv_engine.parallel.connection import GroupLostError, probe
from workers.tensor_parallel import group
from workers.tensor_parallel.group import (
    ENDPOINT_NAME,
    FollowerEndpoint,
    GroupMembership,
    LeaderListener,
    gather,
)

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def toy_is_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "graph", lambda family: harness.TOY)


def config(*ranks: int, **changes: object) -> DeploymentConfig:
    names = ["greet", "llm", "painter"]
    made = DeploymentConfig(
        model="toy",
        name="toy-1",
        checkpoint="/nowhere",
        max_seq_len=128,
        node_groups=[NodeGroup(node_names=names, ranks=list(ranks), tp_size=len(ranks))],
    )
    return msgspec.structs.replace(made, **changes)


class World:
    """A log, and who is said to be on it."""

    def __init__(self) -> None:
        self.log = MemoryLog(MemoryStore(SUBJECTS))
        self.lives = 0

    async def join(self, rank: int, endpoint: bytes) -> None:
        self.lives += 1
        joined = WorkerJoined(
            id=f"w{rank}.joined.{self.lives}",
            writer=f"w{rank}",
            rank=rank,
            model="toy-1",
            nodes=["llm"],
            device="cpu",
            cards={ENDPOINT_NAME: endpoint},
        )
        self.log.post(SUBJECTS.worker(rank), encode(joined))
        await self.log.drain()

    async def gathered(self, asked: DeploymentConfig) -> GroupMembership:
        return await gather(self.log, SUBJECTS, asked, Rank(asked.leaders[0]))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.log.close()


@asynccontextmanager
async def met(world: World, asked: DeploymentConfig) -> AsyncIterator[list[GroupMembership]]:
    """A copy, as its leader and each of its followers has it."""
    listeners = [LeaderListener(asked, rank) for rank in asked.tp_group_of(asked.leaders[0])[1:]]
    waiting = [asyncio.create_task(listener.wait_for_leader()) for listener in listeners]
    leading = asyncio.create_task(world.gathered(asked))
    for listener in listeners:
        await world.join(listener.rank, listener.endpoint)
    copies = [await leading, *[await one for one in waiting]]
    try:
        yield copies
    finally:
        for copy in copies:
            copy.close()
            if copy.rendezvous.listener is not None:
                copy.rendezvous.listener.close()


async def test_all_members_are_told_which_they_are_and_where_they_meet(world: World) -> None:
    async with met(world, config(4, 7, 2)) as copies:
        meetings = [copy.rendezvous for copy in copies]
        for line in copies[0].connections:
            line.send(line.peer.encode())

        assert [(one.index, one.size) for one in meetings] == [(0, 3), (1, 3), (2, 3)]
        assert len({(one.address, one.port, one.key) for one in meetings}) == 1
        assert [one.listener is not None for one in meetings] == [True, False, False]
        assert [bytes(copy.connections[0].receive()) for copy in copies[1:]] == [
            b"rank 7, which follows,",
            b"rank 2, which follows,",
        ]


async def test_a_member_that_is_gone_is_seen_while_nothing_is_computed(world: World) -> None:
    async with met(world, config(0, 1)) as (leader, follower):
        watching = asyncio.create_task(leader.watch())
        await asyncio.sleep(0)
        follower.close()

        with pytest.raises(GroupLostError, match="rank 1, which follows, is gone"):
            await watching


async def test_a_member_that_has_said_something_is_not_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_WATCH_AGAIN_S", 0.0)
    async with met(world, config(0, 1)) as (leader, follower):
        follower.connections[0].send(b"how many blocks it has room for")
        watching = asyncio.create_task(leader.watch())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not watching.done()

        leader.connections[0].receive()
        follower.close()
        with pytest.raises(GroupLostError, match="rank 1, which follows, is gone"):
            await watching


async def test_a_follower_of_an_earlier_copy_is_passed_over_for_its_next_life(world: World) -> None:
    asked = config(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    await world.join(
        1, msgspec.msgpack.encode(FollowerEndpoint(address="127.0.0.1", port=port, secret=b"old"))
    )

    async with met(world, asked) as copies:
        assert len(copies) == 2


async def test_who_does_not_know_the_secret_is_sent_away(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group, "RETRY_S", 0.01)
    asked = config(0, 1)
    listener = LeaderListener(asked, Rank(1))
    endpoint = msgspec.msgpack.decode(listener.endpoint, type=FollowerEndpoint)
    waiting = asyncio.create_task(listener.wait_for_leader())
    leading = asyncio.create_task(world.gathered(asked))
    await world.join(1, msgspec.msgpack.encode(msgspec.structs.replace(endpoint, secret=b"guessed")))
    with closing(socket.create_connection((endpoint.address, endpoint.port))) as stranger:
        stranger.sendall(b"\xff\xff")
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    assert not waiting.done()

    await world.join(1, listener.endpoint)
    for copy in (await leading, await waiting):
        copy.close()
        if copy.rendezvous.listener is not None:
            copy.rendezvous.listener.close()
    assert "not its leader: wrong secret" in caplog.text
    assert "found 65535" in caplog.text


async def test_members_of_different_configurations_do_not_compute_together(world: World) -> None:
    listener = LeaderListener(config(0, 1, max_seq_len=64), Rank(1))
    waiting = asyncio.create_task(listener.wait_for_leader())
    leading = asyncio.create_task(world.gathered(config(0, 1)))
    await world.join(1, listener.endpoint)

    with pytest.raises(ConfigError, match="rank 1 and rank 0, which leads, have different configurations"):
        await waiting
    leading.cancel()
    await asyncio.wait([leading])


async def test_nobody_begins_before_all_have_come(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    asked = config(0, 1, 2)
    listener = LeaderListener(asked, Rank(1))
    probed: list[str] = []

    def probing(connection: socket.socket) -> None:
        is_follower = connection.getsockname()[1] == listener_port
        probed.append("rank 1's" if is_follower else "rank 0's")
        probe(connection)

    listener_port = msgspec.msgpack.decode(listener.endpoint, type=FollowerEndpoint).port
    monkeypatch.setattr(group, "probe", probing)
    waiting = asyncio.create_task(listener.wait_for_leader())
    leading = asyncio.create_task(world.gathered(asked))
    await world.join(1, listener.endpoint)
    while "rank 1 follows" not in caplog.text:  # noqa: ASYNC110 - it has no event of its own
        await asyncio.sleep(0)
    assert not waiting.done()
    assert probed == ["rank 0's", "rank 1's"], "whose machine is gone says nothing"

    leading.cancel()
    with pytest.raises(GroupLostError, match="rank 0, which leads, is gone before all members had connected"):
        await waiting
    await asyncio.wait([leading])


async def test_an_address_of_another_machine_is_refused(world: World) -> None:
    asked = config(0, 1, data_plane=DataPlaneSettings(address="203.0.113.1"))

    with pytest.raises(ConfigError, match=r"rank 1 shares a node and cannot listen at data_plane\.address"):
        LeaderListener(asked, Rank(1))
    with pytest.raises(ConfigError, match="rank 0 shares a node and cannot listen"):
        await world.gathered(asked)
