"""What must be true of every history, whatever went wrong in it."""

from collections import defaultdict

from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer
from shared.events import (
    Event,
    NodeReady,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    decode,
)
from shared.fence import EpochFence
from shared.models import registry
from tests.conductor.script import SUBJECTS
from tests.simulation.simulator import Simulation, text_of

ENDS = (RequestFinished, RequestFailed, RequestCancelled)


def check(sim: Simulation) -> None:
    """All invariants; an AssertionError says which, and how to see it again."""
    for invariant in (
        every_accepted_request_ends_once,
        what_clients_read_is_right,
        nothing_is_dispatched_twice,
        places_are_kept,
        replay_equals_live,
        nothing_is_left_over,
    ):
        try:
            invariant(sim)
        except AssertionError as error:
            again = f"python -m tests.simulation --seed {sim.seed} --story"
            raise AssertionError(f"seed {sim.seed}: {invariant.__name__}: {error}\nagain: {again}") from error


def valid_events(sim: Simulation) -> list[Event]:
    fence = EpochFence()
    found: list[Event] = []
    for record in sim.records:
        event = decode(record.data)
        if fence.admits(event):
            found.append(event)
    return found


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
        text = sim.clients.text.get(request_id, "")
        assert text.startswith(sim.released.get(request_id, "")), (
            f"{request_id}: what was read is contradicted"
        )
        if isinstance(end, RequestFinished):
            assert text == text_of(request_id), f"{request_id}: {text}"
            assert end.output == sim.clients.transcripts[request_id].totals
        else:
            assert text_of(request_id).startswith(text), f"{request_id}: {text}"


def nothing_is_dispatched_twice(sim: Simulation) -> None:
    orders: dict[str, set[bytes]] = defaultdict(set)
    for event in valid_events(sim):
        if isinstance(event, NodeReady):
            orders[event.id].add(repr((event.walks, event.seed, event.attempt, event.incarnation)).encode())
    assert all(len(contents) == 1 for contents in orders.values()), "one id, two orders"
    twice = {str(key) for key, count in sim.started.items() if count > 1}
    assert not twice, f"started twice: {twice}"


def places_are_kept(sim: Simulation) -> None:
    cluster = Cluster(registry.graph, SUBJECTS)
    for record in sim.records:
        cluster.fold(record)
        running = [r.id for r in cluster.open.values() if r.phase is Phase.RUNNING]
        assert len(running) <= sim.plan.places, (
            f"record {record.seq}: {running} run in {sim.plan.places} places"
        )


def replay_equals_live(sim: Simulation) -> None:
    verdicts = Replayer(registry.graph, SUBJECTS).run(sim.records)
    failed = {v.request_id: v.mismatch for v in verdicts.values() if not v.matches}
    assert not failed, failed
    fresh = Cluster(registry.graph, SUBJECTS)
    for record in sim.records:
        fresh.fold(record)
    live = next(c for c in sim.conductors if c.alive and c.cluster.leader == c.name)
    assert fresh.ended == live.cluster.ended
    assert fresh.open == live.cluster.open
    assert fresh.world == live.cluster.world


def nothing_is_left_over(sim: Simulation) -> None:
    live = next(c for c in sim.conductors if c.alive and c.cluster.leader == c.name)
    assert not live.cluster.open
    assert not live.cluster.waiting
    assert not live.cluster.outstanding()
    worker = next(w for w in sim.workers if w.alive and not w.zombie)
    assert not worker.jobs
