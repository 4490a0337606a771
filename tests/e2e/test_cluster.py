"""A deployment on a NATS cluster of three: the leader of its stream is killed while clients stream."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.config import environment
from shared.subjects import Subjects
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.shared.log import cluster
from tests.shared.log.cluster import Cluster
from tests.tiny import tiny_checkpoint

TOKENS = 300
STREAMS = 8
PARAMS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    with cluster.running(tmp_path / "cluster") as servers:
        yield servers


@pytest.fixture
def running(servers: Cluster, tmp_path: Path) -> Iterator[Running]:
    token = servers.credentials.token
    assert token is not None
    told = ("--nats", servers.url, "--durability", "cluster")
    env = {environment.NATS_TOKEN: token}
    with deploy.serve(tmp_path, *told, model=str(tiny_checkpoint("qwen3")), env=env) as running:
        yield running


async def test_with_its_leader_killed_every_stream_goes_on_and_nobody_is_taken_for_dead(
    running: Running, servers: Cluster
) -> None:
    subjects = Subjects(running.prefix)
    answers = [Answer(f"stream-{number}", awaited_tokens=TOKENS // 8) for number in range(STREAMS)]
    async with clients.http(running) as client, asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(clients.generate(client, answer, "Tell me a long story.", **PARAMS))
        for answer in answers:
            await answer.under_way.wait()
        leader = await servers.leader(subjects.stream)
        leader.kill()
    stall_s = max(answer.longest_stall_s for answer in answers)
    print(f"{leader.name} led, and was killed: the longest stall was {stall_s:.1f} s")

    assert len({answer.told[0] for answer in answers}) == 1
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    assert all(answer.indices == list(range(len(answer.indices))) for answer in answers)
    async with clients.reader(running) as reader:
        history = reader.log.history([subjects.lost])
        assert [record.data async for record in history] == [], "a worker was taken for dead"
    assert "Durability: cluster; acked events survive the loss of one" in running.log()
