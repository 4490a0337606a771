"""No answer is computed with two models: requests on ranks that come back with other weights (ADR 27)."""

import pytest

from conductor.core.lifecycle import Phase
from conductor.core.replay import Replayer
from configs.placement import PlacedGroup
from models import registry
from shared.events import (
    NodeReady,
    OutputTotals,
    RequestAdmitted,
    RequestFailed,
    RequestResumed,
)
from shared.ids import Rank
from tests.conductor.script import SUBJECTS, Script, deployment

OLD = {"prepare": "a" * 64, "llm": "b" * 64}
NEW = OLD | {"llm": "c" * 64}
REPLICAS = (PlacedGroup(ranks=(Rank(0), Rank(1), Rank(2)), nodes=("prepare", "llm"), walks=()),)
APART = (
    PlacedGroup(ranks=(Rank(0), Rank(1)), nodes=("prepare", "llm"), walks=("prepare", "prefill", "score")),
    PlacedGroup(ranks=(Rank(2), Rank(3)), nodes=("llm",), walks=("decode",)),
)


@pytest.fixture
def script() -> Script:
    script = Script()
    script.open_epoch()
    script.join(weights=OLD)
    script.submit()
    return script


def matches(script: Script) -> bool:
    verdicts = Replayer(registry.graph, SUBJECTS).run(script.records)
    return all(verdict.matches for verdict in verdicts.values())


def prepared(script: Script) -> NodeReady:
    """The order to decode, after the first step."""
    script.complete(script.last(NodeReady))
    order = script.last(NodeReady)
    assert isinstance(order, NodeReady)
    assert [walk.name for walk in order.walks] == ["prefill", "decode"]
    return order


def test_an_admission_and_a_resumption_name_the_weights(script: Script) -> None:
    assert script.last(RequestAdmitted).weights == OLD
    script.join("w0-b", weights=NEW)
    assert script.last(RequestResumed).weights == NEW


def test_with_the_same_weights_a_request_continues(script: Script) -> None:
    prepared(script)
    script.join("w0-b", weights=OLD)
    order = script.last(NodeReady)
    assert (order.index, order.attempt, order.weights_since) == (1, 2, 0)
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED


def test_with_other_weights_it_starts_from_the_beginning(script: Script) -> None:
    """Ranks look for released output of earlier attempts, which only they and the clients read."""
    prepared(script)
    script.join("w0-b", weights=NEW)
    order = script.last(NodeReady)
    assert (order.index, order.attempt, order.weights_since) == (0, 2, 2)
    script.run_to_the_end()
    assert script.request().phase is Phase.FINISHED
    assert {order.weights_since for order in script.events(NodeReady) if order.attempt == 2} == {2}
    assert matches(script)


def test_a_replay_names_the_weights_and_their_changes(script: Script) -> None:
    script.join("w0-b", weights=NEW)
    script.run_to_the_end()
    [verdict] = Replayer(registry.graph, SUBJECTS).run(script.records).values()
    assert verdict.matches
    assert verdict.weights == NEW
    assert verdict.changed_weights == [f"attempt 2 had other weights: llm had {'b' * 12}, has {'c' * 12}"]


def test_later_attempts_still_name_the_first_one_with_the_present_weights(script: Script) -> None:
    script.join("w0-b", weights=NEW)
    script.join("w0-c", weights=NEW)
    order = script.last(NodeReady)
    assert (order.attempt, order.weights_since) == (3, 2)


def test_weights_that_change_back_are_a_change(script: Script) -> None:
    script.join("w0-b", weights=NEW)
    script.join("w0-c", weights=OLD)
    order = script.last(NodeReady)
    assert (order.attempt, order.weights_since) == (3, 3)


def test_a_request_with_reported_output_fails_by_name() -> None:
    script = Script(serve=deployment())
    script.open_epoch()
    script.join(weights=OLD)
    script.submit()
    script.complete(script.last(NodeReady), output=OutputTotals(chunks=1, digest="d"))
    script.join("w0-b", weights=NEW)
    failed = script.last(RequestFailed)
    assert (failed.failure.code, failed.failure.status) == ("weights_changed", 503)
    assert f"llm had {'b' * 12}, has {'c' * 12}" in failed.failure.message
    assert "prepare" not in failed.failure.message


@pytest.mark.parametrize("known", [(OLD, {}), ({}, NEW), ({}, {})], ids=["before", "after", "never"])
def test_weights_that_are_not_known_are_not_compared(known: tuple[dict[str, str], dict[str, str]]) -> None:
    """A worker of an older version, and all older logs."""
    script = Script()
    script.open_epoch()
    script.join(weights=known[0])
    script.submit()
    prepared(script)
    script.join("w0-b", weights=known[1])
    order = script.last(NodeReady)
    assert (order.index, order.attempt, order.weights_since) == (1, 2, 0)


def test_a_change_is_noticed_behind_a_worker_that_named_no_weights(script: Script) -> None:
    prepared(script)
    script.join("w0-b")
    script.join("w0-c", weights=NEW)
    assert script.last(NodeReady).weights_since == 3


def test_a_resumption_prefers_a_rank_with_the_same_weights() -> None:
    script = Script(serve=deployment(groups=REPLICAS))
    script.open_epoch()
    for rank, weights in ((0, OLD), (1, NEW), (2, OLD)):
        script.join(f"w{rank}-a", rank, weights=weights)
    script.submit()
    assert script.last(RequestAdmitted).placement["llm"] == 0
    prepared(script)
    script.leave(0)
    assert script.last(RequestResumed).placement["llm"] == 2
    assert script.last(NodeReady).weights_since == 0
    script.leave(2)  # only others are left
    assert script.last(RequestResumed).placement["llm"] == 1
    assert script.last(NodeReady).weights_since == 3


def test_ranks_of_a_node_are_chosen_with_the_same_weights() -> None:
    script = Script(serve=deployment(groups=APART))
    script.open_epoch()
    for rank, weights in ((0, NEW), (1, OLD), (2, OLD), (3, OLD)):
        script.join(f"w{rank}-a", rank, weights=weights)
    script.submit()
    admitted = script.last(RequestAdmitted)
    assert admitted.placement["llm"] == 1
    assert admitted.weights["llm"] == admitted.weights["decode/llm"] == OLD["llm"]


def test_a_handover_between_different_weights_is_refused() -> None:
    script = Script(serve=deployment(groups=APART))
    script.open_epoch()
    for rank, weights in ((0, NEW), (1, NEW), (2, OLD), (3, OLD)):
        script.join(f"w{rank}-a", rank, weights=weights)
    script.submit()
    failed = script.last(RequestFailed)
    assert failed.failure.code == "weights_changed"
    assert "loaded different weights (bbbbbbbbbbbb and cccccccccccc)" in failed.failure.message
    assert script.last(NodeReady) is None
    assert matches(script)


def test_a_resumption_across_different_weights_is_refused() -> None:
    script = Script(serve=deployment(groups=APART))
    script.open_epoch()
    for rank in range(4):
        script.join(f"w{rank}-a", rank, weights=OLD)
    script.submit()
    for rank in (0, 1):
        script.leave(rank)
    script.join("w0-b", 0, weights=NEW)
    assert script.last(RequestFailed).failure.code == "weights_changed"
    assert matches(script)
