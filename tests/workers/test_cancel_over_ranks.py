"""A step that is stopped, on several ranks: within two engine steps nothing is held for it, anywhere.

The conductor stops a step when its request is cancelled, and when a rank of it has died: then the request
goes on, later, and maybe elsewhere. So all of it is free once the stop was obeyed, and not with the end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event

import msgspec
import pytest

from models import registry
from shared.events import (
    NodeFired,
    NodeReady,
    OutputChunk,
    StreamSent,
    WalkCompleted,
    WalkFailed,
    WalkStopped,
)
from tests.tiny.orpheus import tiny_orpheus
from tests.workers import harness, mesh
from tests.workers.cluster import Cluster, clustered, until
from tests.workers.mesh import SIZE, MeshModel
from tests.workers.test_rows_over_ranks import PROMPT, calls
from tests.workers.test_rows_over_ranks import config as on_two_ranks
from tests.workers.test_speech_over_ranks import CONFIG as SPEECH
from tests.workers.test_speech_over_ranks import spoken
from tests.workers.test_walks_over_ranks import count, refine, start_takers
from workers import settings
from workers.data_plane.port import TensorStore
from workers.kv_engine.counters import EngineStats
from workers.loading.model import LocalModel


@asynccontextmanager
async def meshed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(registry, "graph", lambda family: mesh.GRAPH)

    def model(rank: int, store: TensorStore) -> MeshModel:
        del store
        return MeshModel(rank)

    async with clustered(mesh.GRAPH, mesh.CONFIG, model) as cluster:
        yield cluster


def gate(cluster: Cluster, rank: int, node: str) -> Event:
    """From now on, a node waits in its thread until this is set."""
    model = cluster.members[rank].model
    assert isinstance(model, MeshModel)
    gate = model.nodes.gates[node] = Event()
    return gate


def edges_of(cluster: Cluster) -> list[tuple[str, bytes]]:
    return [(r.subject, r.data) for r in cluster.server.records if ".edge." in r.subject]


async def test_a_walk_that_is_interrupted_leaves_nothing_on_any_rank_and_late_edges_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with meshed(monkeypatch) as cluster:
        opened = gate(cluster, 1, "push")
        orders = cluster.order("r", refine(3))
        await cluster.until(NodeFired, "r")
        edges = edges_of(cluster)
        cluster.interrupt(orders)
        assert {event.rank for event in await cluster.until(WalkStopped, "r", 2)} == {0, 1}
        opened.set()
        await until(lambda: not cluster.held)
        for subject, data in edges:  # stored again, as after a lost ack
            cluster.server.append(subject, data)
        cluster.order("q", refine(1))
        await cluster.done("q", 2)
        await cluster.empty("q")
        assert not cluster.held

        cluster.put("ds.output.g-1.r.conductor", harness.fence("r", 2))
        cluster.resume("r", 2)
        cluster.order("r", refine(3), attempt=2)
        await cluster.done("r", 2, attempt=2)
        assert not cluster.events(WalkFailed, "r")
        await cluster.empty("r")
        assert not cluster.held


@pytest.mark.parametrize("where", ["two ranks", "one rank"])
async def test_streams_that_are_interrupted_with_a_held_producer_leave_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) if where == "one rank" else None
    async with meshed(monkeypatch) as cluster:
        orders = cluster.order("r", count(100, width=SIZE), ends=["numbers"], ranks=ranks)
        start_takers(cluster, "r", "sliding", "left", ranks=ranks)  # `fixed` takes nothing: it is held
        ready = [record.subject for record in cluster.server.records if ".ready." in record.subject]
        assert len(ready) == len(orders) + 2
        await cluster.until(OutputChunk, "r")
        assert where == "one rank" or cluster.held["slots"]
        cluster.interrupt([*orders, *cluster.events(NodeReady, "r")[len(orders) :]])
        await cluster.interrupted("r", 3)
        await until(lambda: not cluster.held)

        cluster.put("ds.output.g-1.r.conductor", harness.fence("r", 2))
        cluster.order("r", count(100, width=SIZE), ends=["numbers"], attempt=2, ranks=ranks)
        start_takers(cluster, "r", attempt=2, ranks=ranks)
        await cluster.until(WalkCompleted, "r", 4, attempt=2)
        await cluster.empty("r")
        assert not cluster.held


async def test_a_rank_that_is_done_with_its_step_keeps_no_items_for_one_that_begins_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hears of no stop, for nothing of it runs: that the request is resumed tells it."""
    async with meshed(monkeypatch) as cluster:
        cluster.order("r", count(10, width=SIZE), ends=["numbers"])
        await cluster.done("r", index=0)
        early = cluster.held["early"]
        assert cluster.held["slots"]
        assert early == len(cluster.events(StreamSent, "r"))
        cluster.resume("r", 2)
        await until(lambda: not cluster.held)


@pytest.mark.slow
async def test_a_row_that_is_stopped_in_its_decode_is_out_of_both_ranks_within_two_steps() -> None:
    used = on_two_ranks()

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(used, settings.of(used), rank, store.allocate)

    async with clustered(registry.graph("decoder_lm"), used, model) as cluster:
        for name, awaited in (("decoding", OutputChunk), ("just-moved", NodeFired)):
            orders = cluster.order(name, *calls(PROMPT, max_tokens=400))
            await cluster.until(awaited, name)
            cluster.interrupt(orders)
            stopped = await cluster.until(WalkStopped, name, 2)

            assert {event.rank for event in stopped} == {0, 1}
            assert max(event.steps_after for event in stopped) <= 2
            await until(lambda: not cluster.held)
        assert not cluster.events(WalkCompleted)


@pytest.mark.slow
async def test_a_speech_that_is_stopped_while_its_row_is_held_frees_all_three_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    used = msgspec.structs.replace(SPEECH, checkpoint=str(tiny_orpheus()))

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(used, settings.of(used), rank, store.allocate)

    async with clustered(registry.graph("orpheus"), used, model, ranks=(0, 1, 2)) as cluster:
        _, think = spoken([5, 17, 99], tokens=250, to_the_end=False)
        orders = cluster.order("held", *think, step=2, ends=["token"])
        decoding = cluster.members[1].model
        await until(lambda: (decoding.counters() or EngineStats()).held == 1)
        await until(lambda: bool(cluster.held.get("early")))  # nobody takes the tokens yet
        cluster.interrupt(orders)
        stopped = await cluster.until(WalkStopped, "held", 2)
        cluster.resume("held", 2)
        await until(lambda: not cluster.held)
        assert max(event.steps_after for event in stopped) <= 2

        listen, think = spoken([5, 17, 99], tokens=250, to_the_end=False)
        orders = [
            *cluster.order("speaks", *listen, step=1, partition="speech"),
            *cluster.order("speaks", *think, step=2, ends=["token"]),
        ]
        await cluster.until(OutputChunk, "speaks")
        cluster.interrupt(orders)
        stopped = await cluster.until(WalkStopped, "speaks", 3)
        await until(lambda: not cluster.held)
        assert max(event.steps_after for event in stopped) <= 2
        await asyncio.sleep(0)
        assert not cluster.held
