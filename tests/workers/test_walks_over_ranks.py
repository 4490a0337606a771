"""Walks whose nodes are on two ranks: branches, a loop, streams; and what must be left of them: nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from models import registry
from shared.events import (
    NodeFired,
    OutputChunk,
    StreamSent,
    StreamTaken,
    StreamTotals,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WalkStopped,
    decode,
)
from shared.tensors import Handle
from shared.walks import Cutter, chunks_of
from tests.workers import harness, mesh
from tests.workers.cluster import Cluster, clustered, until
from tests.workers.mesh import SIZE, MeshModel, handle
from workers.data_plane.port import TensorStore
from workers.orders.out_of_order_buffer import MAX_PER_REQUEST


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "graph", lambda family: mesh.GRAPH)


@asynccontextmanager
async def meshed() -> AsyncIterator[Cluster]:
    def model(rank: int, store: TensorStore) -> MeshModel:
        del store
        return MeshModel(rank)

    async with clustered(mesh.GRAPH, mesh.CONFIG, model) as cluster:
        yield cluster


def nodes(cluster: Cluster, rank: int) -> mesh.Arithmetic:
    model = cluster.members[rank].model
    assert isinstance(model, MeshModel)
    return model.nodes


async def fetch(cluster: Cluster, handle: Handle, rank: int = 0) -> np.ndarray[Any, Any]:
    data = await cluster.members[rank].store.get(handle)
    return data.view("<f4").reshape(handle.shape).copy()


X = np.arange(SIZE, dtype=np.float32)


def branches(x: Handle | None = None) -> WalkCall:
    return WalkCall(name="branches", inputs={"x": x or handle("x", X)})


def refine(rounds: int, **args: Any) -> WalkCall:
    inputs = {"state": handle("s", np.ones(SIZE)), "by": handle("b", np.full(SIZE, 2.0))}
    return WalkCall(name="refine", inputs=inputs, args={"rounds": rounds, **args})


def count(items: int, **args: Any) -> WalkCall:
    return WalkCall(name="count", inputs={"number": handle("n", [0.0])}, args={"items": items, **args})


# ---- branches and loops --------------------------------------------------------------------------


async def test_branches_on_two_ranks_meet_and_each_rank_reports_its_own() -> None:
    async with meshed() as cluster:
        cluster.order("r", branches())
        done = await cluster.done("r", 2)

        joined = X / 2 + X * 2
        assert done[0].results[0].facts == {"left": 1}
        assert done[1].results[0].facts == {"right": 1, "said": len(f"sum {joined.sum():g}")}
        assert set(done[0].results[0].outputs) == {"joined"}
        assert set(done[1].results[0].outputs) == {"twice", "said"}
        assert np.array_equal(await fetch(cluster, done[0].results[0].outputs["joined"], 1), joined)
        assert np.array_equal(await fetch(cluster, done[1].results[0].outputs["twice"]), X * 2)

        image, said = sorted(cluster.chunks("r"), key=lambda chunk: chunk.modality)
        assert (image.track, image.modality, image.writer) == ("join", "image", "w0")
        assert image.metadata == {"dtype": "float32", "shape": [SIZE], "height": 10}
        assert np.array_equal(np.frombuffer(image.data or b"", "<f4"), joined)
        assert (said.track, said.text, said.writer) == ("say", f"sum {joined.sum():g}", "w1")
        assert (done[0].tracks["join"].chunks, done[1].tracks["say"].chunks) == (1, 1)
        assert done[0].output.chunks == done[1].output.chunks == 0

        kept = {rank: member.store.stats().slots for rank, member in cluster.members.items()}
        assert kept == {0: 1, 1: 1}  # what the walk results in, and nothing else
        await cluster.empty("r")


async def test_a_walk_that_runs_again_in_the_same_step_reads_its_own_tensors() -> None:
    async with meshed() as cluster:
        again = WalkCall(name="refine", inputs={"by": handle("b", np.full(SIZE, 2.0))}, args={"rounds": 2})
        cluster.order("r", refine(1), again)
        done = await cluster.done("r", 2)

        states = [result.outputs["state"] for result in done[0].results]
        assert [float((await fetch(cluster, state))[0]) for state in states] == [3.0, 15.0]
        assert len({state.key for state in states}) == 2
        await cluster.empty("r")


async def test_what_was_kept_is_the_next_steps_input_on_either_rank() -> None:
    async with meshed() as cluster:
        cluster.order("r", branches())
        kept = (await cluster.done("r", 2))[1].results[0].outputs["twice"]
        assert kept.data is None
        cluster.order("r", branches(kept), step=1)
        done = await cluster.done("r", 2, index=1)

        joined = await fetch(cluster, done[0].results[0].outputs["joined"])
        assert np.array_equal(joined, X + X * 4)
        await cluster.empty("r")


@pytest.mark.parametrize(("until_", "rounds"), [(1e30, 4), (10.0, 3)])
async def test_a_loop_over_two_ranks_ends_everywhere_after_the_same_iteration(
    until_: float, rounds: int
) -> None:
    async with meshed() as cluster:
        cluster.order("r", refine(4, until=until_))
        done = await cluster.done("r", 2)

        state = 1.0
        frames = []
        for _ in range(rounds):
            state = (state - 1) + (state + 2)
            frames.append(state)
        assert (await fetch(cluster, done[0].results[0].outputs["state"]))[0] == state
        shown = [np.frombuffer(chunk.data or b"", "<f4")[0] for chunk in cluster.chunks("r")]
        assert shown == frames
        assert [chunk.metadata["shape"] for chunk in cluster.chunks("r")] == [[2]] * rounds
        assert len(nodes(cluster, 1).fired["push"]) == len(nodes(cluster, 0).fired["pull"]) == rounds
        told = cluster.events(NodeFired, "r")
        assert [event.stops for event in told if event.stops] == [["refine"]] * (rounds < 4)
        # A tensor is gone as soon as no rank can read it: of each iteration at most its own are there.
        assert sum(member.store.stats().slots for member in cluster.members.values()) == 1
        await cluster.empty("r")


async def test_a_second_copy_of_an_edge_is_no_second_firing_and_an_early_one_waits() -> None:
    async with meshed() as cluster:
        gate = nodes(cluster, 1).gates["push"] = Event()
        # Rank 1 is told of its order only when rank 0 has told all it can.
        cluster.order("r", refine(3), only=[0])
        await cluster.until(NodeFired, "r")
        copies = [record for record in cluster.server.records if ".edge." in record.subject]
        for record in copies:
            cluster.server.append(record.subject, record.data)
        cluster.order("r", refine(3), only=[1])
        gate.set()
        done = await cluster.done("r", 2)
        for record in [record for record in cluster.server.records if ".edge." in record.subject]:
            cluster.server.append(record.subject, record.data)

        assert (await fetch(cluster, done[0].results[0].outputs["state"]))[0] == 1 * 2**3 + 7
        assert len(nodes(cluster, 1).fired["push"]) == 3
        cluster.order("q", branches())
        await cluster.done("q", 2)
        await cluster.empty("r", "q")


async def test_edges_of_another_life_and_of_another_attempt_count_for_nothing() -> None:
    async with meshed() as cluster:
        gate = nodes(cluster, 1).gates["right"] = Event()
        cluster.order("r", branches())
        wrong = {"twice": handle("wrong", np.zeros(SIZE))}
        for attempt, life in ((1, 99), (2, cluster.members[1].life), (0, cluster.members[1].life)):
            told = NodeFired(
                id=f"wrong.{attempt}.{life}",
                writer="w1",
                request_id="r",
                attempt=attempt,
                incarnation=life,
                walk=0,
                node="right",
                path=(),
                outputs=wrong,
            )
            cluster.put("ds.edge.0.1.r", told)
        gate.set()
        done = await cluster.done("r", 2)

        joined = await fetch(cluster, done[0].results[0].outputs["joined"])
        assert np.array_equal(joined, X / 2 + X * 2)
        await cluster.empty("r")


# ---- what goes wrong -----------------------------------------------------------------------------


async def test_a_tensor_of_a_dead_rank_is_gone_and_its_name_is_told() -> None:
    async with meshed() as cluster:
        cluster.order("r", branches())
        kept = (await cluster.done("r", 2))[1].results[0].outputs["twice"]
        await cluster.members[1].die()
        await cluster.join(1)
        cluster.order("r", branches(kept), step=1)
        [failed] = await cluster.until(WalkFailed, "r", index=1, rank=0)

        assert (failed.failure.code, failed.gone) == ("tensor_gone", kept.key)
        assert kept.key == "r/1/0/branches/right/twice"
        await cluster.empty("r")


async def test_a_node_that_fails_fails_its_ranks_part_and_the_requests_end_frees_the_others() -> None:
    async with meshed() as cluster:
        nodes(cluster, 1).fails.add("push")
        cluster.order("r", refine(3))
        [failed] = await cluster.until(WalkFailed, "r")
        assert (failed.rank, failed.failure.code) == (1, "node_failed")
        await cluster.empty("r")
        nodes(cluster, 1).fails.clear()
        cluster.order("q", refine(3))
        await cluster.done("q", 2)
        await cluster.empty("q")


async def test_a_step_that_is_stopped_in_the_middle_leaves_nothing_on_any_rank() -> None:
    async with meshed() as cluster:
        gate = nodes(cluster, 1).gates["push"] = Event()
        orders = cluster.order("r", refine(3))
        await cluster.until(NodeFired, "r")
        cluster.stop(orders)
        stopped = await cluster.until(WalkStopped, "r", 2)
        gate.set()

        assert {event.rank for event in stopped} == {0, 1}
        await cluster.empty()
        assert not cluster.events(WalkCompleted, "r")
        assert not cluster.events(WalkFailed, "r")


async def test_an_attempt_leaves_nothing_to_the_next_one() -> None:
    async with meshed() as cluster:
        gate = nodes(cluster, 1).gates["push"] = Event()
        cluster.order("r", refine(3))
        await cluster.until(NodeFired, "r")
        cluster.put("ds.output.g-1.r.conductor", harness.fence("r", 2))
        cluster.order("r", refine(3), attempt=2)
        gate.set()
        done = await cluster.done("r", 2, attempt=2)

        assert (await fetch(cluster, done[0].results[0].outputs["state"]))[0] == 15
        assert len(cluster.chunks("r")) == 3
        await cluster.empty("r")


@pytest.mark.parametrize("frames", [[3.0, 7.0], [3.0, 8.0]])
async def test_what_an_attempt_released_is_not_released_again_and_never_contradicted(
    frames: list[float],
) -> None:
    async with meshed() as cluster:
        cluster.admit("r")
        for index, frame in enumerate(frames):
            chunk = OutputChunk(
                id=f"r.out.1.mix.{index}",
                writer="w0",
                request_id="r",
                attempt=1,
                index=index,
                track="mix",
                modality="image",
                data=np.full(2, frame, "<f4").tobytes(),
                metadata={"dtype": "float32", "shape": [2], "height": 10},
            )
            cluster.put("ds.output.g-1.r.w0", chunk)
        cluster.put("ds.output.g-1.r.conductor", harness.fence("r", 2))
        cluster.order("r", refine(3), attempt=2)
        if frames[1] != 7.0:
            [failed] = await cluster.until(WalkFailed, "r")
            assert failed.failure.code == "divergence"
            assert "chunk 1 of node 'mix'" in failed.failure.message
            # Nothing of it was put out: a client sees no frame that contradicts what it has.
            assert {chunk.attempt for chunk in cluster.chunks("r")} == {1}
            return
        done = await cluster.done("r", 2, attempt=2)

        shown = [np.frombuffer(chunk.data or b"", "<f4")[0] for chunk in cluster.chunks("r")]
        assert shown == [3.0, 7.0, 15.0]
        assert [chunk.index for chunk in cluster.chunks("r")] == [0, 1, 2]
        assert done[0].tracks["mix"].chunks == 3
        await cluster.empty("r")


async def test_edges_too_many_and_too_early_fail_the_step_that_lacks_them() -> None:
    async with meshed() as cluster:
        for number in range(MAX_PER_REQUEST + 1):
            early = NodeFired(
                id=f"e{number}",
                writer="w1",
                request_id="r",
                attempt=1,
                incarnation=cluster.members[1].life,
                walk=0,
                node="push",
                path=(number,),
            )
            cluster.put("ds.edge.0.1.r", early)
        cluster.order("r", refine(3))
        [failed] = await cluster.until(WalkFailed, "r")

        assert (failed.rank, failed.failure.code) == (0, "overloaded")
        assert "before the order" in failed.failure.message
        await cluster.empty("r")


# ---- streams -------------------------------------------------------------------------------------


def expected(name: str, items: int) -> list[list[float]]:
    """What a taker tells of each of its chunks."""
    cutter = Cutter(mesh.POLICIES[name])
    return [
        [c.number, c.fresh, c.last, sum(range(c.start + 1, c.stop + 1)), c.stop - c.start]
        for c in cutter.cut(items, ended=True)
    ]


def told(cluster: Cluster, request_id: str, name: str) -> list[list[float]]:
    chunks = [chunk for chunk in cluster.chunks(request_id) if chunk.modality == name]
    return [np.frombuffer(chunk.data or b"", "<f4").tolist() for chunk in chunks]


def start_takers(
    cluster: Cluster, request_id: str, *names: str, enough: int | None = None, **kwargs: Any
) -> None:
    args = {} if enough is None else {"enough": enough}
    for step, name in enumerate(mesh.POLICIES, start=1):
        if not names or name in names:
            cluster.order(request_id, WalkCall(name=name, args=args), step=step, partition=name, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("items", [1, 7, 12])
@pytest.mark.parametrize("where", ["two ranks", "one rank"])
async def test_a_stream_is_cut_by_counts_wherever_its_ends_are(items: int, where: str) -> None:
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) if where == "one rank" else None
    async with meshed() as cluster:
        cluster.order("r", count(items), ends=["numbers"], ranks=ranks)
        start_takers(cluster, "r", ranks=ranks)
        done = await cluster.until(WalkCompleted, "r", 4)

        for name, policy in mesh.POLICIES.items():
            assert told(cluster, "r", name) == expected(name, items), name
            [mine] = [event for event in done if event.results[0].name == name]
            totals = mine.streams["numbers"]
            assert (totals.items, totals.chunks) == (items, chunks_of(policy, items))
        assert bool(cluster.events(StreamSent, "r")) is (where == "two ranks")
        await cluster.empty("r")


async def test_a_stream_without_items_is_one_empty_chunk_and_may_end_with_a_step_that_feeds_nothing() -> None:
    async with meshed() as cluster:
        start_takers(cluster, "r")
        cluster.order("r", branches(), ends=["numbers"])
        await cluster.until(WalkCompleted, "r", 5)

        for name in mesh.POLICIES:
            assert told(cluster, "r", name) == [[0, 0, 1, 0, 0]] == expected(name, 0)
        await cluster.empty("r")


async def test_a_stream_goes_on_through_the_steps_that_feed_it() -> None:
    async with meshed() as cluster:
        cluster.order("r", count(4))
        await cluster.done("r", index=0)
        start_takers(cluster, "r")
        again = WalkCall(name="count", inputs={"number": handle("n", [4.0])}, args={"items": 3})
        cluster.order("r", again, step=4, ends=["numbers"])
        await cluster.until(WalkCompleted, "r", 5)

        for name in mesh.POLICIES:
            assert told(cluster, "r", name) == expected(name, 7), name
        await cluster.empty("r")


async def test_items_that_are_stored_twice_and_out_of_turn_are_taken_once_and_in_turn() -> None:
    async with meshed() as cluster:
        cluster.order("r", count(7), ends=["numbers"])
        await cluster.done("r", index=0)
        sent = [record for record in cluster.server.records if ".edge.1.0.r" in record.subject]
        assert len(sent) == 3 * (7 + 1)
        start_takers(cluster, "q")  # a request of which rank 1 hears everything backwards, and twice
        for record in [*reversed(sent), *sent]:
            event = decode(record.data)
            assert isinstance(event, StreamSent)
            cluster.put("ds.edge.1.0.q", msgspec.structs.replace(event, request_id="q"))
        await cluster.until(WalkCompleted, "q", 3)

        for name in mesh.POLICIES:
            assert told(cluster, "q", name) == expected(name, 7), name
        await cluster.empty("r", "q")


@pytest.mark.parametrize("where", ["two ranks", "one rank"])
@pytest.mark.parametrize("width", [1, SIZE])
async def test_a_taker_that_does_not_get_on_holds_a_fast_producer(
    where: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, window = 100, 16
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", window)
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) if where == "one rank" else None
    async with meshed() as cluster:

        def slots() -> int:
            return sum(member.store.stats().slots for member in cluster.members.values())

        cluster.order("r", count(items, width=width), ends=["numbers"], ranks=ranks)
        start_takers(cluster, "r", "sliding", "left", ranks=ranks)
        made = nodes(cluster, 0).fired
        await until(lambda: len(made.get("counter", ())) > window)
        most = 0
        for _ in range(200):  # it would go on at once, if it might
            await asyncio.sleep(0)
            most = max(most, slots())
        assert len(made["counter"]) == window + 1
        assert most <= 3 * (window + 1)
        start_takers(cluster, "r", "fixed", ranks=ranks)
        await cluster.until(WalkCompleted, "r", 4)

        for name in mesh.POLICIES:
            chunks = told(cluster, "r", name)
            assert [chunk[4] for chunk in chunks] == [chunk[4] for chunk in expected(name, items)]
            assert [chunk[3] for chunk in chunks] == [chunk[3] * width for chunk in expected(name, items)]
        assert bool(cluster.events(StreamTaken, "r")) is (where == "two ranks")
        assert slots() <= 3 * window
        await cluster.empty("r")


@pytest.mark.parametrize("where", ["two ranks", "one rank"])
async def test_a_taker_that_is_done_before_its_stream_holds_nobody_and_keeps_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, enough = 100, 2
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    ranks = dict.fromkeys(mesh.GRAPH.nodes, 0) if where == "one rank" else None
    async with meshed() as cluster:
        cluster.order("r", count(items, width=SIZE), ends=["numbers"], ranks=ranks)
        start_takers(cluster, "r", enough=enough, ranks=ranks)
        done = await cluster.until(WalkCompleted, "r", 4)

        for name, policy in mesh.POLICIES.items():
            assert [chunk[0] for chunk in told(cluster, "r", name)] == [0, 1]
            [mine] = [event for event in done if event.results[0].name == name]
            had = policy.span(enough - 1)[1]
            assert mine.streams["numbers"] == StreamTotals(items=had, chunks=enough, left=True)
        closed = [event for event in cluster.events(StreamTaken, "r") if event.closed]
        assert len(closed) == (len(mesh.POLICIES) if where == "two ranks" else 0)
        assert not any(member.store.stats().slots for member in cluster.members.values())
        await cluster.empty("r")


async def test_who_begins_to_feed_a_stream_that_was_left_already_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    async with meshed() as cluster:
        for to in ("take_fixed", "take_sliding", "take_left"):
            sent = StreamSent(
                id=f"sent.{to}",
                writer="w0",
                request_id="r",
                attempt=1,
                incarnation=cluster.members[0].life,
                stream="numbers",
                to=to,
                items=handle(f"i.{to}", np.ones((4, 1))),
            )
            cluster.put("ds.edge.1.0.r", sent)
        start_takers(cluster, "r", enough=1)
        await cluster.until(StreamTaken, "r", 3, closed=True)
        cluster.order("r", count(100, width=SIZE), ends=["numbers"])
        await cluster.done("r", index=0)

        assert len(cluster.events(StreamSent, "r")) == 3
        assert not any(member.store.stats().slots for member in cluster.members.values())
        await cluster.empty("r")


async def test_a_walk_that_has_enough_does_not_hold_up_the_next_one_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    async with meshed() as cluster:
        cluster.order("r", count(100), ends=["numbers"])
        enough = WalkCall(name="fixed", args={"enough": 1})
        cluster.order("r", enough, WalkCall(name="sliding"), step=1, partition="p")
        start_takers(cluster, "r", "left")
        await cluster.until(WalkCompleted, "r", 3)

        assert told(cluster, "r", "sliding") == expected("sliding", 100)
        await cluster.empty("r")


async def test_a_stream_that_was_left_fails_the_step_that_would_go_on_with_it() -> None:
    async with meshed() as cluster:
        cluster.order("r", count(100), ends=["numbers"])
        start_takers(cluster, "r", "fixed", enough=1)
        await cluster.until(StreamTaken, "r", closed=True)
        cluster.order("r", WalkCall(name="fixed"), step=4, partition="again")
        [failed] = await cluster.until(WalkFailed, "r")

        assert "stopped consuming it before its end" in failed.failure.message
        await cluster.empty("r")


async def test_a_small_stream_costs_no_credits() -> None:
    async with meshed() as cluster:
        cluster.order("r", count(200), ends=["numbers"])
        start_takers(cluster, "r")
        await cluster.until(WalkCompleted, "r", 4)

        assert not cluster.events(StreamTaken, "r")
        assert isinstance(cluster.chunks("r")[0], OutputChunk)
        await cluster.empty("r")
