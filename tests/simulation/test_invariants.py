"""Each invariant can fail: a defect is introduced on purpose, and exactly that invariant reports it."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conductor.core import cluster as clusters
from conductor.core import orders, poison_pills, react, replicas, schedule, snapshot
from conductor.core.cluster import Cluster, Folded
from conductor.core.request import Decision, Request
from gateway.requests.relay import AnswerItem, Failed
from shared.epoch_fence import EpochFence
from shared.events import Failure, OutputTotals
from tests.simulation import conductors, invariants
from tests.simulation.gateways import START, Answer, Gateway
from tests.simulation.invariants import WHILE_IT_RAN, BrokenInvariantError, hold, run
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation
from tests.simulation.speaking import Speaker
from tests.simulation.workers import Worker
from workers.orders.inbox import Inbox, RequestEnded

Sabotage = Callable[[pytest.MonkeyPatch], None]
SEEDS = 150


def no_handing_over(patch: pytest.MonkeyPatch) -> None:
    """A new leader publishes none of its predecessor's decisions."""
    patch.setattr(Cluster, "outstanding", lambda _: [])


def no_refusals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "_refuse", lambda *_: Folded())


def whoever_was_there_is_to_blame(patch: pytest.MonkeyPatch) -> None:
    """A death counts against every request on the rank, and no request is quarantined."""
    suspects_in_company(patch)
    patch.setattr(poison_pills, "uses_up_attempt", poison_pills._may_have_caused)
    patch.setattr(react, "_attempts_exhausted", lambda *_: Failure(code="poison_request", message="to blame"))


def patience_with_poison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(poison_pills, "exhausted", lambda request: request.suspicion.tries >= 9)


def attempts_without_a_reason(patch: pytest.MonkeyPatch) -> None:
    hold_it = react.Reactor._hold

    def twice(self: react.Reactor, request: Request, *args: Any) -> Any:
        return hold_it(self, msgspec.structs.replace(request, attempt=request.attempt + 1), *args)

    patch.setattr(react.Reactor, "_hold", twice)


def no_reading_on(patch: pytest.MonkeyPatch) -> None:
    """A resuming client receives nothing."""
    patch.setattr(Gateway, "_read_on", lambda *_: False)


def no_regard_for_positions(patch: pytest.MonkeyPatch) -> None:
    """A resuming client receives everything again."""
    ask = Gateway.ask
    patch.setattr(Gateway, "ask", lambda self, client, _: ask(self, client, START))


def other_words_in_another_attempt(patch: pytest.MonkeyPatch) -> None:
    put = Speaker._put

    def otherwise(self: Speaker, post: Any, **content: Any) -> None:
        if self._key.attempt > 1 and content.get("text"):
            content["text"] = "!" * len(content["text"])
        put(self, post, **content)

    patch.setattr(Speaker, "_put", otherwise)


def another_error_than_recorded(patch: pytest.MonkeyPatch) -> None:
    put = Answer.put

    def otherwise(self: Answer, items: list[AnswerItem]) -> None:
        failure = Failure(code="something_else", message="")
        put(self, [Failed(failure) if isinstance(item, Failed) else item for item in items])

    patch.setattr(Answer, "put", otherwise)


def no_epochs(patch: pytest.MonkeyPatch) -> None:
    """Events of deposed conductors count, and `schedule` decides differently each time."""
    chosen = iter(range(1_000_000))
    patch.setattr(schedule, "derived_seed", lambda _: next(chosen))
    patch.setattr(EpochFence, "_is_deposed", lambda *_: False)


def no_memory_of_orders(patch: pytest.MonkeyPatch) -> None:
    ready = Inbox._ready

    def forgetful(self: Inbox, order: Any) -> Any:
        self._requests.clear()
        return ready(self, order)

    patch.setattr(Inbox, "_ready", forgetful)


def each_rank_is_told_something_else(patch: pytest.MonkeyPatch) -> None:
    order = orders.order

    def otherwise(*args: Any) -> Any:
        told = order(*args)
        return msgspec.structs.replace(told, reason=f"for rank {told.rank}")

    patch.setattr(react, "order", otherwise)


def one_place_too_many(patch: pytest.MonkeyPatch) -> None:
    decide = schedule.schedule

    def generous(waiting: Any, held: Any, places: Any, world: Any, serve: Any, **named: Any) -> Any:
        more = serve.max_concurrent_requests + 1
        larger = msgspec.structs.replace(serve, max_concurrent_requests=more)
        return decide(waiting, held, places, world, larger, **named)

    patch.setattr(clusters, "schedule", generous)


def suspects_in_company(patch: pytest.MonkeyPatch) -> None:
    """No request is kept away from a rank with a suspect in quarantine."""

    def take(self: replicas.Ranks, place: replicas.Place) -> None:
        self.load.update(place.ranks)

    patch.setattr(replicas.Ranks, "occupy", take)


def other_totals_than_put_out(patch: pytest.MonkeyPatch) -> None:
    other = {"output": OutputTotals(chunks=99, digest="x")}
    patch.setattr(Speaker, "totals", property(lambda self: other if self.said else {}))


def a_leader_that_forgets_joins(patch: pytest.MonkeyPatch) -> None:
    take = conductors.Conductor.take

    def forgetful(self: conductors.Conductor, record: Any) -> None:
        take(self, record)
        self.cluster._joins.clear()

    patch.setattr(conductors.Conductor, "take", forgetful)


def a_snapshot_that_forgets(patch: pytest.MonkeyPatch) -> None:
    load = snapshot.load

    def forgetful(*args: Any) -> Cluster:
        cluster = load(*args)
        cluster.digests.clear()
        return cluster

    patch.setattr(snapshot, "load", forgetful)


def nobody_looks_after_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "_staff", lambda *_: None)


def tensors_for_ever(patch: pytest.MonkeyPatch) -> None:
    forget = Worker._forget

    def careless(self: Worker, request_id: str) -> None:
        self.attempts.pop(request_id, None)
        forget(self, request_id)

    patch.setattr(Worker, "_forget", careless)


def memory_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "_end", lambda _, event: RequestEnded(str(event.request_id)))


def decisions_that_get_lost(patch: pytest.MonkeyPatch) -> None:
    """One decision in five never reaches the log."""
    publish = conductors.Conductor.publish

    def careless(self: conductors.Conductor, decisions: Any) -> None:
        kept: list[Decision] = []
        for decision in decisions:
            self.number += 1
            if self.number % 5:
                kept.append(decision)
        publish(self, kept)

    patch.setattr(conductors.Conductor, "publish", careless)


BROKEN: dict[str, list[Sabotage]] = {
    WHILE_IT_RAN: [no_regard_for_positions],
    "every_accepted_request_ends_once": [no_handing_over, decisions_that_get_lost],
    "every_refusal_is_told_once": [no_refusals],
    "failures_have_a_cause": [whoever_was_there_is_to_blame],
    "poisons_are_found_out": [patience_with_poison],
    "attempts_are_bounded": [attempts_without_a_reason],
    "every_client_is_answered": [no_reading_on],
    "what_clients_read_is_right": [other_words_in_another_attempt],
    "what_clients_are_told_is_recorded": [another_error_than_recorded],
    "decisions_are_made_once": [no_epochs],
    "nothing_is_started_twice": [no_memory_of_orders],
    "all_ranks_of_a_step_are_told_the_same": [each_rank_is_told_something_else],
    "at_each_position_the_rules_hold": [one_place_too_many, suspects_in_company],
    "replay_matches": [other_totals_than_put_out, decisions_that_get_lost],
    "whole_fold_is_the_leaders": [a_leader_that_forgets_joins],
    "snapshot_and_tail_are_the_whole_fold": [a_snapshot_that_forgets],
    "nothing_is_left_over": [nobody_looks_after_workers],
    "no_tensor_is_orphaned": [tensors_for_ever],
    "memory_is_bounded": [memory_for_ever],
}


def test_every_invariant_is_broken_on_purpose_below() -> None:
    assert BROKEN.keys() == {WHILE_IT_RAN, *(one.__name__ for one in invariants.INVARIANTS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sabotage"),
    [(name, sabotage) for name, sabotages in BROKEN.items() for sabotage in sabotages],
)
def test_what_is_broken_is_named(name: str, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)

    assert any(name in broken(seed) for seed in range(SEEDS)), f"{name} holds in {SEEDS} histories"


def broken(seed: int) -> set[str]:
    """All invariants that a history violates."""
    plan = Plan.of(seed).changed({"rest_steps": 3_000})
    try:
        past = run(Simulation(seed, plan))
    except BrokenInvariantError as error:
        return {error.invariant}
    found: set[str] = set()
    for invariant in invariants.INVARIANTS:
        try:
            hold(past, invariant)
        except BrokenInvariantError as error:
            found.add(error.invariant)
    return found
