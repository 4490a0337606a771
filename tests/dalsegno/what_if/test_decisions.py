"""Decisions of another configuration, each given the recorded past."""

from typing import Any

import msgspec
import pytest

from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup
from dalsegno.gate import admission
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.gate.scheduling import Redecided
from dalsegno.what_if import decision_report, decisions
from dalsegno.what_if.decisions import Change, Otherwise
from models import registry
from shared.ids import Rank
from tests.conductor import script
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.gate.rich_log import rich_log


def ranks(*of: int) -> tuple[PlacedGroup, ...]:
    return (PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=tuple(map(Rank, of))),)


def started(*joining: int, **changes: Any) -> Script:
    found = Script(serve=script.deployment(**changes))
    found.open_epoch()
    for rank in joining or (0,):
        found.join(f"w{rank}-a", rank)
    return found


def what_if(
    recorded: Script, kv_tokens: int | None = None, deployment: Deployment | None = None, **changes: Any
) -> Otherwise:
    deployment = deployment or recorded.deployment
    other = msgspec.structs.replace(deployment, config_digest="other", **changes)
    records = [one for one in recorded.records if for_conductor(one.subject, SUBJECTS)]
    made = index(records, SUBJECTS, registry.graph)
    return decisions.decide_otherwise(
        records,
        made,
        dict.fromkeys(made.epochs, deployment),
        dict.fromkeys(made.epochs, other),
        subjects=SUBJECTS,
        graph_of=registry.graph,
        kv_tokens=kv_tokens,
    )


def of_request(found: Otherwise, request_id: str) -> Change:
    [change] = [one for one in found.changes if one.request_id == request_id]
    return change


def three_at_once() -> Script:
    """Three requests at once, which end in order of their submission."""
    recorded = started()
    for name in ("r1", "r2", "r3"):
        recorded.submit(name)
    for name in ("r1", "r2", "r3"):
        recorded.run_to_the_end(name)
    return recorded


def test_the_recorded_configuration_changes_nothing() -> None:
    found = what_if(three_at_once())
    assert found.changes == []
    assert found.unlike == []
    assert found.decided == 3


def test_with_fewer_places_requests_wait_behind_those_that_have_them() -> None:
    found = what_if(three_at_once(), max_concurrent_requests=1)
    assert [(one.request_id, one.kind) for one in found.changes] == [("r2", "later"), ("r3", "later")]
    second, third = found.changes
    assert second.behind == ["r1"]
    assert third.behind == ["r1", "r2"], "the recorded past has r2 running"
    assert second.why == "max_concurrent_requests is 1, and 1 ran"
    assert "would have waited behind 1 running (r1)" in decision_report.sentence(second)


def test_the_wait_ends_with_the_recorded_ends_of_those_in_front() -> None:
    recorded = three_at_once()
    [two, three] = what_if(recorded, max_concurrent_requests=1).changes
    ends = {
        str(event.request_id): seq
        for seq, event in enumerate(recorded.events(), 1)
        if "Finished" in type(event).__name__
    }
    assert two.seconds == pytest.approx((ends["r1"] - two.seq) / 1000)  # the script's records are 1 ms apart
    assert three.seconds == pytest.approx((ends["r2"] - three.seq) / 1000)


def test_without_an_end_in_the_log_the_wait_is_not_said() -> None:
    recorded = started()
    recorded.submit("r1")
    recorded.submit("r2")
    recorded.submit("r3", model="another")  # the log goes on, so the conductor lived
    change = of_request(what_if(recorded, max_concurrent_requests=1), "r2")
    assert change.seconds is None
    assert "later" not in decision_report.sentence(change)


def test_with_more_places_requests_are_admitted_earlier() -> None:
    recorded = started(max_concurrent_requests=1)
    recorded.submit("r1")
    submitted = recorded.submit("r2")
    recorded.run_to_the_end("r1")
    recorded.run_to_the_end("r2")
    change = of_request(what_if(recorded, max_concurrent_requests=2), "r2")
    assert change.kind == "earlier"
    assert change.found == submitted
    assert change.seconds == pytest.approx((change.recorded - submitted) / 1000)
    assert "concurrent request 2 of 2" in change.why


def test_a_full_queue_refuses_and_names_the_limit() -> None:
    recorded = started(max_concurrent_requests=1)
    for name in ("r1", "r2", "r3"):
        recorded.submit(name)
    for name in ("r1", "r2", "r3"):
        recorded.run_to_the_end(name)
    found = what_if(recorded, max_waiting=1)
    change = of_request(found, "r3")
    assert (change.kind, change.found) == ("refused", "queue_full")
    assert "scheduling.max_waiting" in change.why


def test_a_longer_queue_lets_a_refused_request_wait() -> None:
    recorded = started(max_concurrent_requests=1, max_waiting=1)
    for name in ("r1", "r2", "r3"):
        recorded.submit(name)
    for name in ("r1", "r2"):
        recorded.run_to_the_end(name)
    change = of_request(what_if(recorded, max_waiting=5), "r3")
    assert (change.kind, change.recorded, change.found) == ("not_refused", "queue_full", "waiting")
    assert (change.behind, change.ahead) == (["r1"], ["r2"])


def test_more_places_admit_a_refused_request() -> None:
    recorded = started(max_concurrent_requests=1, max_waiting=0)
    recorded.submit("r1")
    recorded.submit("r2")
    recorded.run_to_the_end("r1")
    change = of_request(what_if(recorded, max_concurrent_requests=2), "r2")
    assert (change.kind, change.recorded, change.found) == ("not_refused", "queue_full", "admitted")


def test_another_policy_places_elsewhere_and_says_why() -> None:
    recorded = started(0, 1, groups=ranks(0, 1))
    for name in ("r1", "r2"):
        recorded.submit(name)
        recorded.run_to_the_end(name)
    change = of_request(what_if(recorded, replicas="rr"), "r2")
    assert change.kind == "elsewhere"
    assert change.recorded == {"placement.prepare": 0, "placement.llm": 0}
    assert change.found == {"placement.prepare": 1, "placement.llm": 1}
    assert "round robin" in change.why


def test_a_limit_per_rank_names_the_requests_there() -> None:
    found = what_if(three_at_once(), max_per_replica=2)
    change = of_request(found, "r3")
    assert change.behind == ["r1", "r2"]
    assert change.why == "each rank of prepare and llm had 2 requests (scheduling.max_in_flight_per_replica)"


def test_a_rank_that_was_not_there_is_taken_to_be_like_another_of_its_group() -> None:
    found = what_if(three_at_once(), groups=ranks(0, 1))
    assert found.added_ranks == {1: 0}
    assert of_request(found, "r2").found == {"placement.prepare": 1, "placement.llm": 1}
    assert any("rank 1 is not in the log" in note for note in decision_report.notes_of(found))


def test_a_smaller_cache_lowers_the_limit_of_a_request() -> None:
    found = what_if(three_at_once(), kv_tokens=64)
    change = of_request(found, "r1")
    assert (change.kind, change.recorded, change.found) == (
        "changed",
        {"limits.kv_tokens": 128},
        {"limits.kv_tokens": 64},
    )


def test_what_differs_with_the_recorded_configuration_is_no_effect_of_the_change() -> None:
    recorded = three_at_once()
    wrong = msgspec.structs.replace(recorded.deployment, max_concurrent_requests=1)
    found = what_if(recorded, deployment=wrong, max_waiting=7)
    assert found.changes == []
    assert found.unlike == ["r2", "r3"]
    assert any("`dalsegno gate`" in note for note in decision_report.notes_of(found))


@pytest.mark.parametrize("seed", [1, 2])
def test_in_a_log_with_lost_workers_only_the_change_has_an_effect(seed: int) -> None:
    log = rich_log(seed, "fsfs", 120)
    recorded = Script(serve=log.deployment)
    recorded.records = log.records
    assert what_if(recorded).changes == []
    kinds = {one.kind for one in what_if(recorded, max_concurrent_requests=2).changes}
    assert "later" in kinds
    assert "earlier" not in kinds
    kinds = {one.kind for one in what_if(recorded, max_concurrent_requests=60, max_waiting=60).changes}
    assert {"earlier", "not_refused"} & kinds
    assert "later" not in kinds


def test_a_bundle_tells_of_its_own_request_alone() -> None:
    recorded = started()
    recorded.submit("r1")
    recorded.run_to_the_end("r1")
    records = [one for one in recorded.records if for_conductor(one.subject, SUBJECTS)]
    made = index(records, SUBJECTS, registry.graph)
    other = msgspec.structs.replace(
        recorded.deployment, limits=msgspec.structs.replace(script.LIMITS, max_attempts=9)
    )

    def again(one: Deployment) -> Redecided:
        return admission.decide_again(
            records, made, lambda _: one, subjects=SUBJECTS, graph_of=registry.graph
        )

    before, after = again(recorded.deployment), again(other)
    change = of_request(decisions.of_bundle(before, after), "r1")
    assert (change.kind, change.found) == ("changed", {"limits.max_attempts": 9})
