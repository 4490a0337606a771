"""What must be true of every history, whatever went wrong in it."""

from collections import defaultdict

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer
from conductor.core.request import Decision
from shared.events import (
    Event,
    NodeReady,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
)
from shared.fence import EpochFence
from shared.placement import rank_of
from tests.conductor.script import SUBJECTS
from tests.simulation.simulator import Simulation

ENDS = (RequestFinished, RequestFailed, RequestCancelled)


def check(sim: Simulation) -> None:
    """All invariants; an AssertionError says which, and how to see it again."""
    for invariant in (
        every_accepted_request_ends_once,
        what_clients_read_is_right,
        nothing_is_dispatched_twice,
        all_ranks_of_a_step_are_told_the_same,
        attempts_are_bounded,
        replay_equals_live,
        nothing_is_left_over,
    ):
        try:
            invariant(sim)
        except AssertionError as error:
            again = f"python -m tests.simulation --seed {sim.seed} {sim.flag} --story"
            raise AssertionError(f"seed {sim.seed}: {invariant.__name__}: {error}\nagain: {again}") from error


def valid_events(sim: Simulation) -> list[Event]:
    fence = EpochFence()
    return [event for event in sim.decoded if fence.admits(event)]


def every_accepted_request_ends_once(sim: Simulation) -> None:
    events = valid_events(sim)
    accepted = {event.request_id for event in events if isinstance(event, RequestSubmitted)}
    ends: dict[str | None, set[tuple[str, str]]] = defaultdict(set)
    for event in events:
        if isinstance(event, ENDS):
            ends[event.request_id].add((event.id, type(event).__name__))
    assert accepted == set(ends), f"accepted {accepted}, ended {set(ends)}"
    assert all(len(kinds) == 1 for kinds in ends.values()), f"ended twice: {dict(ends)}"
    for request_id, kinds in ends.items():
        (kind,) = {kind for _, kind in kinds}
        assert kind != "RequestFailed" or sim.plan.max_attempts < 100, f"{request_id} failed"
        assert kind != "RequestCancelled" or request_id in sim.cancelled, f"{request_id} was not cancelled"


def what_clients_read_is_right(sim: Simulation) -> None:
    for request_id in sim.clients.submitted:
        (end,) = sim.clients.ends[request_id]
        read, released = sim.clients.text.get(request_id, {}), sim.released.get(request_id, {})
        wanted = sim.texts(request_id)
        assert read.keys() | released.keys() <= wanted.keys(), f"{request_id}: {read}"
        for track, text in wanted.items():
            known = read.get(track, "")
            assert known.startswith(released.get(track, "")), f"{request_id}: what was read is contradicted"
            assert text.startswith(known), f"{request_id}: {known}"
        if isinstance(end, RequestFinished):
            assert read == wanted, f"{request_id}: {read}"
            assert end.output == sim.clients.transcripts[request_id].totals


def nothing_is_dispatched_twice(sim: Simulation) -> None:
    orders: dict[str, set[bytes]] = defaultdict(set)
    for event in valid_events(sim):
        if isinstance(event, NodeReady):
            orders[event.id].add(repr((event.walks, event.seed, event.attempt, event.incarnation)).encode())
    assert all(len(contents) == 1 for contents in orders.values()), "one id, two orders"
    twice = {str(key) for key, count in sim.started.items() if count > 1}
    assert not twice, f"started twice: {twice}"


def all_ranks_of_a_step_are_told_the_same(sim: Simulation) -> None:
    told: dict[tuple[str | None, int, int], dict[int, NodeReady]] = defaultdict(dict)
    for event in valid_events(sim):
        if isinstance(event, NodeReady):
            same = msgspec.structs.replace(event, id="", number=0, epoch=None, rank=0, incarnation=0)
            told[event.request_id, event.attempt, event.index][event.rank] = same
    for step, by_rank in told.items():
        order = next(iter(by_rank.values()))
        assert all(other == order for other in by_rank.values()), f"{step}: two orders"
        hosts = {
            rank_of(order.placement, order.walk_placement, walk.name, node)
            for walk in order.walks
            for node in sim.graph_of(sim.deployment.family).walks[walk.name].nodes
        }
        assert hosts == by_rank.keys(), f"{step}: told {set(by_rank)}, its nodes are on {hosts}"


def attempts_are_bounded(sim: Simulation) -> None:
    most = max((event.attempt for event in valid_events(sim)), default=0)
    assert most <= sim.plan.max_attempts, f"attempt {most} of {sim.plan.max_attempts}"


def replay_equals_live(sim: Simulation) -> None:
    verdicts = Replayer(sim.graph_of, SUBJECTS).run(sim.records)
    failed = {v.request_id: v.mismatch for v in verdicts.values() if not v.matches}
    assert not failed, failed
    fresh = Cluster(sim.graph_of, SUBJECTS)
    for record in sim.records:
        folded = fresh.fold(record)
        places_are_kept(sim, fresh)
        steps_are_sent_to_ranks_that_are_there(fresh, folded.decisions)
    live = next(c for c in sim.conductors if c.alive and c.cluster.leader == c.name)
    assert fresh.ended == live.cluster.ended
    assert fresh.open == live.cluster.open
    assert fresh.world == live.cluster.world


def places_are_kept(sim: Simulation, cluster: Cluster) -> None:
    running = [r.id for r in cluster.open.values() if r.phase is Phase.RUNNING]
    assert len(running) <= sim.plan.places, f"record {cluster.seq}: {running} run in {sim.plan.places} places"


def steps_are_sent_to_ranks_that_are_there(cluster: Cluster, decisions: tuple[Decision, ...]) -> None:
    for order in decisions:
        if isinstance(order, NodeReady):
            lives = {order.rank: order.incarnation, **order.lives}
            there = {rank: cluster.world.incarnation(rank) for rank in lives}
            what = f"record {cluster.seq}: {order.id} is for {lives}, there is {there}"
            assert lives == there, what
            assert None not in there.values(), what


def nothing_is_left_over(sim: Simulation) -> None:
    live = next(c for c in sim.conductors if c.alive and c.cluster.leader == c.name)
    assert not live.cluster.open
    assert not live.cluster.waiting
    assert not live.cluster.outstanding()
    assert not [rank for rank in sim.ranks if (worker := sim.present(rank)) is None or worker.busy]
