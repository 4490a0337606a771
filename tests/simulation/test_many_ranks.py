"""Histories of a model on many ranks, by the hundred; and that the invariants miss a rule taken away.

`SIMULATION_SEEDS` sets how many, as in `tests.simulation.test_simulation`.
"""

import os
from collections.abc import Callable

import pytest

from conductor.core import react
from conductor.core.request import Request
from shared.events import EdgeEvent, OutputFence, WalkFailed, WorkerJoined, WorkerLeaving
from shared.plans import Journey
from tests.simulation.invariants import check
from tests.simulation.many_ranks import ManyRanks, plan_of
from tests.simulation.simulator import Plan

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "500")) * 2 // 5
BATCHES = 5


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_invariants_hold_in_every_history(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        check(ManyRanks(seed).run())


def test_the_same_seed_is_the_same_history() -> None:
    assert ManyRanks(3).run().records == ManyRanks(3).run().records


def test_what_can_go_wrong_goes_wrong_in_some_of_them() -> None:
    seen = {type(event) for seed in range(40) for event in ManyRanks(seed).run().decoded}
    assert {OutputFence, WalkFailed, WorkerLeaving, *EdgeEvent.__args__[:2]} <= seen
    assert {plan_of(seed).layout for seed in range(40)} == {"one", "two", "three", "replicas"}


@pytest.mark.parametrize("seed", range(0, 30, 5))
def test_from_any_prefix_of_the_log_the_same_end_is_reached(seed: int) -> None:
    whole = ManyRanks(seed).run()
    quiet = Plan(
        requests=whole.plan.requests, places=whole.plan.places, layout=whole.plan.layout, faulty_steps=0
    )
    for cut in range(0, len(whole.records), max(1, len(whole.records) // 6)):
        again = ManyRanks(seed, quiet, whole.records[:cut]).run()
        if whole.plan.max_attempts > 100:
            check(again)


# ---- the checker can fail ------------------------------------------------------------------------


def no_going_back_to_where_it_ran_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journey, "alone", lambda _, count: count)


def no_running_again_of_what_made_a_tensor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journey, "before", lambda journey, _: len(journey._fed))


def no_regard_for_the_other_ranks_of_a_step(patch: pytest.MonkeyPatch) -> None:
    concerns = react.concerns

    def careless(request: Request, event: react.Fact) -> bool:
        if not isinstance(event, WorkerJoined):
            return concerns(request, event)
        return any(event.rank == min(step.lives, default=event.rank) for step in request.running)

    patch.setattr(react, "concerns", careless)


def no_tracks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(react, "_grown", lambda _, reported: reported)


@pytest.mark.parametrize(
    "sabotage",
    [
        no_going_back_to_where_it_ran_alone,
        no_running_again_of_what_made_a_tensor,
        no_regard_for_the_other_ranks_of_a_step,
        no_tracks,
    ],
)
def test_a_rule_taken_away_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        _check_seeds(400)


def _check_seeds(count: int) -> None:
    for seed in range(count):
        check(ManyRanks(seed).run())
