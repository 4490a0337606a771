"""The gate notices mistakes in the code that schedules, and none where there is none."""

from collections.abc import Iterator
from functools import cache
from typing import Final, get_args

import pytest

from conductor.core.replicas import Policy
from dalsegno.gate import control, scheduling
from dalsegno.gate.recorded_decisions import RecordedDecisions, for_conductor, index
from dalsegno.gate.results import Examined
from dalsegno.gate.scheduling import Redecided
from models import registry
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS
from tests.dalsegno.gate.mutations import REACTING, SCHEDULING, Mutation
from tests.dalsegno.gate.rich_log import RichLog, rich_log
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation

POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
SEEDS: Final = (1, 2)
GOES_BACK: Final = frozenset({"log loses its tail", "log is made anew"})
"""Accidents after which a log no longer has what its conductors knew."""

recorded_log = cache(rich_log)
"""The logs are recorded without any mutation, each once."""


def scheduled(log: RichLog) -> Redecided:
    records = [one for one in log.records if for_conductor(one.subject, SUBJECTS)]
    recorded = index(records, SUBJECTS, registry.graph)
    return scheduling.decide_again(
        records,
        recorded,
        dict.fromkeys(recorded.epochs, log.deployment),
        subjects=SUBJECTS,
        graph_of=registry.graph,
    )


def reacted(log: RichLog) -> Examined:
    requests = {str(one.request_id) for one in map(SUBJECTS.parse, [r.subject for r in log.records]) if one}
    return control.of_log(log.records, SUBJECTS, requests, "log", {})


def logs(first: Policy) -> Iterator[RichLog]:
    for seed in SEEDS:
        for policy in (first, *(one for one in POLICIES if one != first)):
            yield recorded_log(seed, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_mutation_every_decision_is_as_recorded(policy: Policy) -> None:
    for seed in SEEDS:
        log = recorded_log(seed, policy)
        found = scheduled(log)
        assert found.differences == []
        assert sum(found.decided.values()) > 100
        assert found.skipped == {}
        also = reacted(log)
        assert (also.differences, also.cannot) == ([], {})
        assert sum(also.decided.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("mutation", SCHEDULING, ids=lambda one: one.name)
def test_a_mistake_in_the_scheduler_is_noticed(mutation: Mutation) -> None:
    recorded = list(logs(mutation.policy))
    with mutation.applied():
        assert any(scheduled(log).differences for log in recorded)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", REACTING, ids=lambda one: one.name)
def test_a_mistake_in_the_reactions_is_noticed(mutation: Mutation) -> None:
    recorded = list(logs("fsfs"))
    with mutation.applied():
        assert any(reacted(log).differences for log in recorded)


def test_a_replay_does_not_notice_what_the_level_schedule_notices() -> None:
    log = recorded_log(1, "fsfs")
    blind = [
        one
        for one in SCHEDULING
        if one.name in {"priorities are reversed", "one request at a time", "the refusal has another code"}
    ]
    assert len(blind) == 3
    for mutation in blind:
        with mutation.applied():
            assert reacted(log).differences == []
            assert scheduled(log).differences


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 48, 8))
def test_whatever_conductors_workers_and_log_suffer_no_difference_is_invented(start: int) -> None:
    decided = 0
    for seed in range(start, start + 8):
        plan = Plan.of(seed)
        rates = {name: rate for name, rate in plan.rates.items() if name not in GOES_BACK}
        sim = Simulation(seed, plan.changed({"rates": rates})).run()
        records = [one for one in sim.log.records if for_conductor(one.subject, SUBJECTS)]
        recorded = index(records, SUBJECTS, sim.model.graph_of)
        found = scheduling.decide_again(
            records,
            recorded,
            dict.fromkeys(recorded.epochs, sim.deployment),
            subjects=SUBJECTS,
            graph_of=sim.model.graph_of,
        )
        assert found.differences == [], sim.command
        decided += sum(found.decided.values())
    assert decided


def test_the_recorded_decisions_are_found_with_the_records_after_which_they_were_made() -> None:
    log = recorded_log(1, "fsfs")
    records: list[StoredRecord] = [one for one in log.records if for_conductor(one.subject, SUBJECTS)]
    recorded: RecordedDecisions = index(records, SUBJECTS, registry.graph)
    made = [one for epoch in recorded.epochs.values() for one in epoch.made.values()]
    assert all(one.earliest <= one.latest < one.seq for one in made)
    # The script stores a decision right behind the record that it follows from, and other decisions of it.
    assert sum(one.seq - one.latest <= 2 for one in made) > len(made) / 2
