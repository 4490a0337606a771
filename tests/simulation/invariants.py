"""Invariants of every history, whatever went wrong in it.

Each invariant examines a finished history, and returns how much there was to examine: an invariant that never
examines anything proves nothing (`tests.simulation.soak` counts).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from conductor.core import snapshot
from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer
from configs.placement import rank_of
from shared.events import (
    DeadlinePassed,
    EpochOpened,
    Event,
    NodeReady,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    WalkFailed,
    WorkerLost,
)
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import SUBJECTS
from tests.simulation import memory
from tests.simulation.clients import Client, Service
from tests.simulation.history import Past, fold, for_conductors, state, unstamped
from tests.simulation.simulator import Simulation

NOT_TAKEN: Final = frozenset({"request_id_conflict"})
"""How clients are told that nothing was stored for them."""
WHILE_IT_RAN: Final = "while_it_ran"
"""What is found by somebody in the simulated world."""
CUTS: Final = 3
"""At so many places a fold is interrupted, written down and gone on with."""


class BrokenInvariantError(AssertionError):
    """A history violates an invariant; the message names both, and the command that repeats it."""

    def __init__(self, sim: Simulation, invariant: str, what: str) -> None:
        super().__init__(f"seed {sim.seed}: {invariant}: {what}\nagain: {sim.command} --step")
        self.sim = sim
        self.invariant = invariant


def check(past: Past) -> Counter[str]:
    """Check all invariants of a history; return how much each examined.

    Raises:
        BrokenInvariantError: the first that does not hold.
    """
    looked_at: Counter[str] = Counter()
    for invariant in INVARIANTS:
        looked_at[invariant.__name__] = hold(past, invariant)
    return looked_at


def hold(past: Past, invariant: "Invariant") -> int:
    """Check one invariant of a history."""
    try:
        return invariant(past)
    except Exception as error:
        what = str(error) or type(error).__name__
        raise BrokenInvariantError(past.sim, invariant.__name__, what) from error


def run(sim: Simulation) -> Past:
    """Run a history to its end, or to the first assertion that fails in a simulated process."""
    try:
        sim.run()
        return Past.of(sim)
    except Exception as error:
        raise BrokenInvariantError(sim, WHILE_IT_RAN, str(error) or type(error).__name__) from error


# ---- requests ------------------------------------------------------------------------------------


def every_accepted_request_ends_once(past: Past) -> int:
    accepted, ended = past.submissions.keys(), past.ends.keys()
    assert accepted == ended, f"accepted {sorted(accepted)}, ended {sorted(ended)}"
    for request_id, ends in past.ends.items():
        assert len(ends) == 1, f"{request_id} ended {[type(end).__name__ for _, end in ends.values()]}"
    return len(accepted)


def every_refusal_is_told_once(past: Past) -> int:
    """Each submission that is unreadable, or differs under a known id, is refused once."""
    log, known = past.sim.log, dict[str, str]()
    refused: set[int] = set()
    for record, address, event in zip(log.records, log.addresses, log.events, strict=True):
        if address.kind != "request":
            continue
        if isinstance(event, RequestSubmitted):
            first = known.setdefault(str(address.request_id), event.inputs.text or "")
            if first == event.inputs.text:
                continue
        refused.add(record.seq)
    told: defaultdict[int, set[str]] = defaultdict(set)
    for _, event in past.of_kind(RequestRejected):
        told[event.submission_seq].add(event.id)
        if event.failure.code == "queue_full" and past.sim.plan.waiting is not None:
            refused.add(event.submission_seq)
    assert refused == told.keys(), f"to be refused {sorted(refused)}, refused {sorted(told)}"
    assert all(len(ids) == 1 for ids in told.values()), f"refused twice: {dict(told)}"
    return len(refused)


def failures_have_a_cause(past: Past) -> int:
    for request_id in past.submissions:
        end = past.end_of(request_id)
        if isinstance(end, RequestFailed):
            cause = CAUSES.get(end.failure.code)
            assert cause is not None, f"{request_id} failed: {end.failure}"
            cause(past, request_id, end)
        if isinstance(end, RequestCancelled):
            wanted = [seq for seq, _ in past.of_kind(RequestCancel, request_id)]
            assert wanted, f"{request_id} is cancelled, and nobody wanted that"
    return sum(not isinstance(past.end_of(one), RequestFinished) for one in past.submissions)


def _poison(past: Past, request_id: str, end: RequestFailed) -> None:
    """An innocent request fails only by accidents: one for each try, including the last."""
    if request_id in past.sim.poisons:
        return
    deaths = past.deaths_under(request_id)
    accidents = [life for life in deaths if life.killer is None]
    told = f"{request_id} is innocent, and failed: {end.failure.message}; the deaths under it: {deaths}"
    assert len(accidents) >= max(1, past.sim.plan.max_attempts - 1), told
    assert deaths[-1] in accidents, told


def _lost(past: Past, request_id: str, end: RequestFailed) -> None:
    assert past.deaths_under(request_id), f"{request_id} failed, and no worker died under it: {end.failure}"
    _is_tried_out(past, request_id, end)


def _gone(past: Past, request_id: str, end: RequestFailed) -> None:
    _is_tried_out(past, request_id, end)


def _is_tried_out(past: Past, request_id: str, end: RequestFailed) -> None:
    """Each try has its own reason: an incarnation that ended, or a lost tensor."""
    lives = {life.incarnation for life in past.deaths_under(request_id)} | past.missed_by(request_id)
    lost, most = past.sim.lost_tensors[request_id], past.sim.plan.max_attempts
    assert len(lives) + lost >= most, (
        f"{request_id} failed after the ends of {len(lives)} lives and {lost} tensors lost, of {most}: "
        f"{end.failure.message}"
    )


def _late(past: Past, request_id: str, end: RequestFailed) -> None:
    end_seq = next(iter(past.ends[request_id].values()))[0]
    clock_ns, said = 0, False
    for record in past.sim.log.records[:end_seq]:
        clock_ns = max(clock_ns, record.time_ns)
        event = past.sim.log.events[record.seq - 1]
        if isinstance(event, DeadlinePassed) and event.request_id == request_id:
            said |= record.time_ns >= event.deadline_ns
    assert said, f"{request_id} failed, and none of its limits was over: {end.failure.message}"


def _other(past: Past, request_id: str, end: RequestFailed) -> None:
    assert past.sim.seen["a medium comes out otherwise than before"], f"{request_id}: {end.failure}"


def _other_weights(past: Past, request_id: str, end: RequestFailed) -> None:
    """Its ranks had another checkpoint at one time than at another, or than one another."""
    placed = [*past.of_kind(RequestAdmitted, request_id), *past.of_kind(RequestResumed, request_id)]
    known = {digest for _, event in placed for digest in event.weights.values()}
    assert len(known) > 1, f"{request_id} failed, and all its ranks had one checkpoint: {end.failure}"


CAUSES: Final[dict[str, Callable[[Past, str, RequestFailed], None]]] = {
    "poison_request": _poison,
    "worker_lost": _lost,
    "tensor_gone": _gone,
    "deadline_exceeded": _late,
    "replay_divergence": _other,
    "weights_changed": _other_weights,
}


def poisons_are_found_out(past: Past) -> int:
    """A request that kills its worker each time fails after the expected number of deaths."""
    found = 0
    for request_id, poison in past.sim.poisons.items():
        if poison.is_proven_first or not past.is_of(request_id, past.sim.kind_of(request_id)):
            continue
        end = past.end_of(request_id)
        deaths = [life for life in past.deaths_under(request_id) if life.killer == request_id]
        finishes = poison.after > 0 and isinstance(end, RequestFinished)
        assert finishes or not isinstance(end, RequestFinished), f"{request_id} kills workers, and finished"
        # A death beside one that is proven is in doubt, and is no try. What this one did may be put down to
        # another; and who gets further in one partition than ever before has all tries again in the others.
        others = len(past.blamed - {request_id})
        steps = len(past.sim.model.parts) if past.sim.model.streams else 0
        most = (past.sim.plan.max_attempts + 1) * (1 + others) + steps
        assert len(deaths) <= most, f"{request_id} killed {len(deaths)} workers, expected {most} at most"
        found += bool(deaths)
    return found


def attempts_are_bounded(past: Past) -> int:
    """Each new attempt has its own reason: an incarnation that ended, or a lost tensor."""
    most = 0
    for request_id in past.submissions:
        attempts = max((e.attempt for _, e in past.valid if e.request_id == request_id), default=0)
        ended = sum(life.end_seq is not None for life in past.lives)
        gone = {e.id for _, e in past.of_kind(WalkFailed, request_id) if e.gone}
        assert attempts <= 1 + ended + len(gone), f"{request_id}: {attempts} attempts, {ended} lives ended"
        most = max(most, attempts)
    return max(0, most - 1)


# ---- what clients are told -----------------------------------------------------------------------


def every_client_is_answered(past: Past) -> int:
    for client in past.sim.clients:
        assert not client.wants_more, f"{client} still waits"
    for service in past.sim.services:
        assert service.reading.is_over, f"{service} still waits"
    return len(past.sim.clients) + len(past.sim.services)


def what_clients_read_is_right(past: Past) -> int:
    """No chunk twice, none missing, none that contradicts another reading; each track of one checkpoint."""
    pieces = 0
    for who in _everybody(past):
        wanted = past.sim.expected(who.request_id)
        for reading in _readings(who):
            assert reading.text.keys() <= wanted[0].keys(), f"{who}: {reading.text}"
            for track, text in reading.text.items():
                assert any(of[track].startswith(text) for of in wanted), (
                    f"{who}: track {track!r}: {text!r} of {[of[track] for of in wanted]}"
                )
                pieces += 1
            if reading.end == "finished":
                wholes = {track: {of[track] for of in wanted} for track in wanted[0]}
                assert reading.text.keys() == wholes.keys(), f"{who}: told it is complete: {reading.text}"
                assert all(text in wholes[track] for track, text in reading.text.items()), (
                    f"{who}: told it is complete: {reading.text}"
                )
    return pieces


def what_clients_are_told_is_recorded(past: Past) -> int:
    """The end that a client received is in the log, and its output is the recorded one."""
    told = 0
    for who in _everybody(past):
        for reading in _readings(who):
            if not reading.is_over or reading.generation != past.sim.log.generation:
                continue  # the log went back since: it may have lost that end
            if reading.end in NOT_TAKEN and past.was_taken(who.request_id):
                continue
            if not past.is_of(who.request_id, who.question.kind):
                assert reading.end in NOT_TAKEN, f"{who}: told {reading.end}, and nothing is recorded"
                continue
            end = past.end_of(who.request_id)
            assert reading.end == _as_told(end), f"{who}: told {reading.end}, recorded {end}"
            transcript, chunks = past.transcript(who.request_id)
            if isinstance(end, RequestFinished):
                assert end.output == transcript.totals, f"{who}: {end.output} is not what is in the log"
                assert reading.chunks == len(chunks), f"{who}: {reading.chunks} of {len(chunks)} chunks"
            told += 1
    return told


def _everybody(past: Past) -> list[Client | Service]:
    return [*past.sim.clients, *past.sim.services]


def _readings(who: Client | Service) -> list[Any]:
    return [*(who.old if isinstance(who, Client) else ()), who.reading]


def _as_told(end: Event) -> str:
    match end:
        case RequestFailed() | RequestRejected():
            return end.failure.code
        case RequestCancelled():
            return "request_cancelled"
        case _:
            return "finished"


# ---- what is decided -----------------------------------------------------------------------------


def decisions_are_made_once(past: Past) -> int:
    """All valid copies of a decision are equal, across crashes and conductors."""
    contents: dict[tuple[str, str], Event] = {}
    copies = 0
    for _, event in past.valid:
        if event.writer != CONDUCTOR_WRITER or isinstance(event, EpochOpened | DeadlinePassed | WorkerLost):
            continue
        first = contents.setdefault((event.id, type(event).__name__), unstamped(event))
        assert first == unstamped(event), f"one id, two decisions: {first} and {event}"
        copies += first is not event
    return copies


def nothing_is_started_twice(past: Past) -> int:
    twice = {str(one) for one, count in past.sim.started.items() if count > 1}
    assert not twice, f"started twice: {twice}"
    return len(past.sim.started)


def all_ranks_of_a_step_are_told_the_same(past: Past) -> int:
    told: defaultdict[tuple[str | None, int, int], dict[int, NodeReady]] = defaultdict(dict)
    for _, order in past.orders.values():
        same = msgspec.structs.replace(order, id="", number=0, epoch=None, rank=0, incarnation=0)
        told[order.request_id, order.attempt, order.index][order.rank] = same
    graph = past.sim.model.graph_of(past.sim.deployment.family)
    for step, by_rank in told.items():
        order = next(iter(by_rank.values()))
        assert all(other == order for other in by_rank.values()), f"{step}: two orders"
        hosts = {
            rank_of(order.placement, order.walk_placement, walk.name, node)
            for walk in order.walks
            for node in graph.walks[walk.name].nodes
        }
        assert hosts == by_rank.keys(), f"{step}: told {set(by_rank)}, its nodes are on {hosts}"
    return sum(len(by_rank) > 1 for by_rank in told.values())


def at_each_position_the_rules_hold(past: Past) -> int:
    """Capacity, quarantine and incarnations hold at each position of the log."""
    on_probation = 0
    for cluster, record, folded in fold(past.sim):
        where = f"record {record.seq}"
        assert folded.divergence is None, f"{where}: {folded.divergence}"
        admitted = [one for one in cluster.open.values() if one.phase is not Phase.WAITING]
        places = past.sim.plan.places
        assert len(admitted) <= places, f"{where}: {len(admitted)} are admitted to {places} places"
        on_probation += _probations(cluster, where)
        for order in folded.decisions:
            if isinstance(order, NodeReady):
                lives = {order.rank: order.incarnation, **order.lives}
                there = {rank: cluster.world.incarnation(rank) for rank in lives}
                is_there = lives == there and None not in there.values()
                assert is_there, f"{where}: {order.id} is for {lives}, there is {there}"
        memory.check_cluster(cluster, where)
    return on_probation


def _probations(cluster: Cluster, where: str) -> int:
    """At most one suspect runs on a rank, concurrently only with proven requests."""
    found = 0
    running = [one for one in cluster.open.values() if one.phase is Phase.RUNNING]
    for suspect in running:
        for rank in suspect.suspicion.alone_on:
            beside = [
                other.id
                for other in running
                if other is not suspect and rank in other.ranks and not other.suspicion.proven
            ]
            assert not beside, f"{where}: {suspect.id} is to be alone on rank {rank}, beside it run {beside}"
            found += 1
    return found


def replay_matches(past: Past) -> int:
    verdicts = Replayer(past.sim.model.graph_of, SUBJECTS).run(past.sim.log.records)
    failed = {v.request_id: v.mismatch for v in verdicts.values() if not v.matches}
    assert not failed, str(failed)
    return sum(verdict.decided for verdict in verdicts.values())


def whole_fold_is_the_leaders(past: Past) -> int:
    """A conductor that starts empty derives the leader's state."""
    *_, (fresh, _, _) = fold(past.sim)
    live = state(past.sim.leader.cluster)
    for name, value in state(fresh).items():
        assert value == live[name], f"{name}: {value} after the whole log, {live[name]} in the leader"
    return 1


def snapshot_and_tail_are_the_whole_fold(past: Past) -> int:
    sim, records = past.sim, for_conductors(past.sim)
    chance = random.Random(f"cuts {sim.seed}")
    cuts = chance.sample(range(1, len(records)), min(CUTS, len(records) - 1))
    dumps: dict[int, bytes] = {}
    came: list[Any] = []
    whole = Cluster(sim.model.graph_of, SUBJECTS)
    for read, record in enumerate(records, 1):
        came.append(whole.fold(record))
        if read in cuts:
            dumps[read] = snapshot.dump(whole)
    for read, data in dumps.items():
        tail = snapshot.load(data, sim.model.graph_of, SUBJECTS)
        where = f"with a snapshot of record {tail.seq}"
        for record, expected in zip(records[read:], came[read:], strict=True):
            found = tail.fold(record)
            assert found.decisions == expected.decisions, f"{where}: record {record.seq}: {found}"
        for name, value in state(tail).items():
            wanted = getattr(whole, name)
            assert value == wanted, f"{where}: {name} is {value}, and without {wanted}"
    return len(dumps)


# ---- what is left --------------------------------------------------------------------------------


def nothing_is_left_over(past: Past) -> int:
    """All processes are alive and idle."""
    cluster = past.sim.leader.cluster
    left = {"open": cluster.open, "waiting": cluster.waiting, "held": cluster.held}
    assert not any(left.values()), str(left)
    assert not cluster.outstanding(), str(cluster.outstanding())
    for rank in past.sim.ranks:
        worker = past.sim.present(rank)
        assert worker is not None, f"nobody runs rank {rank}"
        assert not worker.jobs, f"{worker} is at {list(worker.jobs)}"
    return len(past.sim.ranks)


def no_tensor_is_orphaned(past: Past) -> int:
    for worker in past.sim.workers:
        assert worker.scopes == 0, f"{worker} holds tensors of requests that ended: {worker.tensor_names}"
    return past.sim.seen["a tensor is made"]


def memory_is_bounded(past: Past) -> int:
    """After the end of all requests, memory does not depend on their number."""
    for worker in past.sim.workers:
        memory.check_worker(worker)
    for gateway in past.sim.gateways:
        assert not gateway.answers, f"{gateway} keeps answers: {dict(gateway.answers)}"
    for conductor in past.sim.conductors:
        memory.check_cluster(conductor.cluster, f"{conductor} at rest")
    return 1


Invariant: TypeAlias = Callable[[Past], int]
INVARIANTS: Final[tuple[Invariant, ...]] = (
    every_accepted_request_ends_once,
    every_refusal_is_told_once,
    failures_have_a_cause,
    poisons_are_found_out,
    attempts_are_bounded,
    every_client_is_answered,
    what_clients_read_is_right,
    what_clients_are_told_is_recorded,
    decisions_are_made_once,
    nothing_is_started_twice,
    all_ranks_of_a_step_are_told_the_same,
    at_each_position_the_rules_hold,
    replay_matches,
    whole_fold_is_the_leaders,
    snapshot_and_tail_are_the_whole_fold,
    nothing_is_left_over,
    no_tensor_is_orphaned,
    memory_is_bounded,
)
