"""Verified and refused durability, in messages and on real servers."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from shared.errors import DalSegnoError
from shared.log.nats.api import ClusterInfo, ClusterPeer, StreamConfig, StreamInfo
from shared.log.nats.durability import METADATA, StreamPolicy, Varz, check_cluster, check_stream, check_synced
from shared.log.nats.jetstream import connect, provision
from shared.log.nats.private_server import NatsServer
from shared.log.port import Durability, DurabilityError, LogUnavailableError
from shared.subjects import Subjects
from tests.shared.log.cluster import Cluster, running

_SYNCED = Varz._JetStream(Varz._JetStream._Config(sync_always=True))


def _stream(
    promise: str | None, replicas: int = 1, *, storage: str = "file", persist_mode: str = ""
) -> StreamInfo:
    metadata = {METADATA: promise} if promise is not None else {}
    return StreamInfo(
        config=StreamConfig(
            num_replicas=replicas, storage=storage, persist_mode=persist_mode, metadata=metadata
        )
    )


# ---- in words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "info", "found"),
    [
        ("process", _stream("process"), "process"),
        ("process", _stream("host"), "host"),
        ("host", _stream("host"), "host"),
        ("cluster", _stream("cluster", 3), "cluster"),
        ("process", _stream(None), "process"),  # somebody else made it: what everybody can see is believed
        ("process", _stream("cluster", 1), "process"),  # copies were taken away since
        ("process", _stream("the moon", 3), "process"),
    ],
)
def test_a_stream_gives_what_it_was_found_to_give(
    asked: Durability, info: StreamInfo, found: Durability
) -> None:
    assert check_stream(asked, info, "NATS") == found


@pytest.mark.parametrize(
    ("asked", "info", "why"),
    [
        ("host", _stream("process"), "is host, but the stream was provisioned for process"),
        ("host", _stream("cluster", 3), "is host, but the stream was provisioned for cluster"),
        ("cluster", _stream("host", 3), "is cluster, but the stream was provisioned for host"),
        ("cluster", _stream("cluster", 1), "provisioned for process, with 1 replica"),
        ("process", _stream("process", storage="memory"), "expected file storage, found memory"),
        ("process", _stream("process", persist_mode="async"), "found persist_mode async"),
    ],
)
def test_one_that_gives_less_is_refused_with_what_was_found(
    asked: Durability, info: StreamInfo, why: str
) -> None:
    with pytest.raises(DurabilityError, match=why) as caught:
        check_stream(asked, info, "NATS")
    assert "\n" not in caught.value.message


def test_a_cluster_is_three_servers_with_a_leader() -> None:
    peers = [ClusterPeer("b"), ClusterPeer("c")]
    info = _stream("cluster", 3)
    told = {
        peers_told: check_cluster(StreamInfo(config=info.config, cluster=group), "NATS")
        for peers_told, group in {
            "all": ClusterInfo("a", peers),
            "no leader": ClusterInfo("", peers),
            "two": ClusterInfo("a", peers[:1]),
        }.items()
    }
    assert told == {"all": True, "no leader": False, "two": False}
    with pytest.raises(DurabilityError, match="at least 3 servers"):
        check_cluster(_stream("cluster", 1), "NATS")


def test_every_server_that_keeps_the_stream_must_sync() -> None:
    one, other = Varz("one", _SYNCED), Varz("other")
    check_synced(["one"], [one, other], "NATS")
    with pytest.raises(DurabilityError, match="'other' acks before it syncs"):
        check_synced(["one", "other"], [one, other], "NATS")
    with pytest.raises(DurabilityError, match=r"none of nats\.monitors is the server 'third'"):
        check_synced(["one", "third"], [one, other], "NATS")
    with pytest.raises(DurabilityError, match=r"monitoring addresses in nats\.monitors"):
        check_synced(["one"], [], "NATS")


# ---- on real servers --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["synced", "not synced"])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster"), syncs=request.param) as cluster:
        yield cluster


async def _provide(cluster: Cluster, subjects: Subjects, keeping: StreamPolicy) -> tuple[Durability, int]:
    await provision(cluster.url, cluster.credentials, subjects, keeping, timeout_s=20)
    log = await connect(
        cluster.url,
        credentials=cluster.credentials,
        subjects=subjects,
        name="test",
        durability=keeping.durability,
        timeout_s=20,
    )
    try:
        return log.durability, (await log.state()).replicas
    finally:
        await log.close()


async def _refusal(cluster: Cluster, subjects: Subjects, keeping: StreamPolicy) -> DalSegnoError:
    """Return the reason why a stream is not created; a slow server is asked again."""
    while True:
        try:
            await provision(cluster.url, cluster.credentials, subjects, keeping)
        except (DurabilityError, LogUnavailableError) as error:
            if "did not answer" not in error.message:
                return error


@pytest.mark.processes
async def test_a_server_is_asked_whether_it_syncs_and_believed_only_then(
    cluster: Cluster, subjects: Subjects, request: pytest.FixtureRequest
) -> None:
    host = StreamPolicy(durability="host", monitors=cluster.monitors)
    if "not synced" in request.node.name:
        refused = await _refusal(cluster, subjects, host)
        assert isinstance(refused, DurabilityError)
        assert "expected `sync_interval: always`" in refused.message
    else:
        assert await _provide(cluster, subjects, host) == ("host", 1)
    blind = await _refusal(cluster, subjects, StreamPolicy(durability="host"))
    assert isinstance(blind, DurabilityError)
    assert "only the server's monitoring shows" in blind.message
    dead = StreamPolicy(durability="host", monitors=["http://127.0.0.1:1"])
    unheard = await _refusal(cluster, subjects, dead)
    assert isinstance(unheard, LogUnavailableError)
    assert "nats.monitors: expected the monitoring of a NATS server at http://127.0.0.1:1" in unheard.message


@pytest.mark.processes
async def test_a_stream_gets_its_copies_and_keeps_them(cluster: Cluster, subjects: Subjects) -> None:
    assert await _provide(cluster, subjects, StreamPolicy()) == ("process", 1)
    assert await _provide(cluster, subjects, StreamPolicy(durability="cluster")) == ("cluster", 3)
    assert await _provide(cluster, subjects, StreamPolicy(max_bytes=1 << 29)) == ("process", 3)
    too_much = StreamPolicy(max_bytes=1 << 29, media_max_bytes=1 << 30)
    refused = await _refusal(cluster, subjects, too_much)
    assert "lower nats.max_bytes or media.store_bytes" in refused.message


async def test_a_server_that_is_alone_is_no_cluster(nats_server: NatsServer, subjects: Subjects) -> None:
    with pytest.raises(DurabilityError, match=r"not supported in non-clustered mode.*at least 3 servers"):
        await provision(
            nats_server.url,
            nats_server.credentials,
            subjects,
            StreamPolicy(durability="cluster"),
            timeout_s=0,
        )


async def test_a_stream_that_gives_less_is_waited_for_no_longer_than_told(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    url, credentials = nats_server.url, nats_server.credentials
    await provision(url, credentials, subjects)
    with pytest.raises(DurabilityError, match="provision --durability host"):
        await connect(url, credentials=credentials, subjects=subjects, name="test", durability="host")
    waiting = asyncio.ensure_future(
        connect(url, credentials=credentials, subjects=subjects, name="t", durability="host", timeout_s=20)
    )
    await asyncio.sleep(0)
    await provision(url, credentials, subjects, StreamPolicy(durability="host", syncs_always=True))
    log = await waiting
    assert log.durability == "host"
    await log.close()


async def test_a_stream_that_somebody_made_in_memory_is_refused(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    client = await nats.connect(nats_server.url, token=nats_server.token)
    request = {"name": subjects.stream, "subjects": subjects.logged(), "storage": "memory"}
    await client.request(f"$JS.API.STREAM.CREATE.{subjects.stream}", json.dumps(request).encode())
    await client.close()
    with pytest.raises(DurabilityError, match="expected file storage, found memory"):
        await connect(nats_server.url, credentials=nats_server.credentials, subjects=subjects, name="test")


@pytest.mark.processes
@pytest.mark.parametrize("syncs", [True, False])
def test_a_private_server_is_told_to_sync_only_where_that_is_asked_for(
    tmp_path: Path, *, syncs: bool
) -> None:
    server = NatsServer(tmp_path / "nats", syncs_always=syncs)
    server.start()
    try:
        config = (tmp_path / "nats" / "server.conf").read_text()
    finally:
        server.stop()
    assert bool(re.search(r"jetstream \{.*sync_interval: always.*\}", config)) is syncs
