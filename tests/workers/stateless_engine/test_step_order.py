"""The order of the calls of stepped runs."""

from collections.abc import Hashable, Mapping

import pytest

from workers.stateless_engine.step_order import StepOrder


def started(order: StepOrder[str], groups: Mapping[str, Hashable]) -> StepOrder[str]:
    for run, group in groups.items():
        order.add(run)
        assert order.next_start() == run
        order.ask(run, group, 1.0)
    return order


def served(
    order: StepOrder[str], groups: Mapping[str, Hashable], forwards: int, seconds: float = 1.0
) -> list[str]:
    """The runs of so many forwards, each of `seconds` for each call; no run ends."""
    found = list[str]()
    for _ in range(forwards):
        batch = order.take()
        order.learn(len(batch), seconds * len(batch))
        for run in batch:
            order.ask(run, groups[run], 1.0)
        found.append("+".join(batch))
    return found


def test_where_batches_do_not_pay_the_oldest_run_ends_first() -> None:
    groups = dict.fromkeys("abc", "same")
    order = started(StepOrder(max_batch=8, max_runs=8), groups)
    assert served(order, groups, 8) == ["a", "a", "a", "a+b+c", "a+b+c", "a+b+c", "a", "a"]


def test_the_gain_is_told_of_the_group_that_was_computed() -> None:
    groups = dict.fromkeys("ab", "same")
    order = started(StepOrder(max_batch=8, max_runs=8), groups)
    gains = list[float]()
    for _ in range(6):
        batch = order.take()
        gains.append(order.learn(len(batch), 1.0))
        for run in batch:
            order.ask(run, groups[run], 1.0)
    assert gains == [1, 1, 1, 1, 1, 2]


def test_groups_share_the_time() -> None:
    groups = {"film": "large", "a": "small", "b": "small"}
    order = started(StepOrder(max_batch=1, max_runs=8), groups)
    seconds = {"film": 4.0, "a": 1.0, "b": 1.0}
    found = list[str]()
    for _ in range(10):
        [run] = order.take()
        order.learn(1, seconds[run])
        order.ask(run, groups[run], 1.0)
        found.append(run)
    assert found == ["film", "a", "a", "a", "a", "film", "a", "a", "a", "a"]


def test_a_new_group_has_no_claim_on_the_past() -> None:
    groups = {"film": "large"}
    order = started(StepOrder(max_batch=1, max_runs=8), groups)
    served(order, groups, 100)
    groups["a"] = "small"
    started(order, {"a": "small"})
    assert sorted(served(order, groups, 4)) == ["a", "a", "film", "film"]


def test_a_group_that_was_idle_has_no_claim_on_the_past() -> None:
    groups = {"a": "small", "film": "large"}
    order = started(StepOrder(max_batch=1, max_runs=8), groups)
    served(order, groups, 2)
    order.drop("a")
    served(order, groups, 100)
    started(order, {"a": "small"})
    assert sorted(served(order, groups, 4)) == ["a", "a", "film", "film"]


def test_so_many_runs_are_under_way_and_no_more() -> None:
    order = StepOrder[str](max_batch=4, max_runs=2)
    for run in "abc":
        order.add(run)
    assert [order.next_start() for _ in range(3)] == ["a", "b", None]
    order.drop("a")
    assert order.next_start() == "c"
    assert list(order) == ["b", "c"]


def test_a_batch_has_a_largest_number_and_cost() -> None:
    groups = dict.fromkeys("abcd", "same")
    order = StepOrder[str](max_batch=3, max_runs=8, max_cost=5)
    for run, cost in zip("abcd", (2.0, 2.0, 2.0, 1.0), strict=True):
        order.add(run)
        order.next_start()
        order.ask(run, groups[run], cost)
    for _ in range(3):
        [run] = order.take()
        order.learn(1, 1.0)
        order.ask(run, "same", 2.0)
    assert order.take() == ["a", "b"], "a third one would cost 6"


def test_a_run_that_is_dropped_is_not_taken() -> None:
    order = started(StepOrder(max_batch=1, max_runs=8), {"a": 1, "b": 1})
    order.drop("a")
    assert order.take() == ["b"]
    assert order.take() == []


def test_nothing_can_be_computed_in_no_batch() -> None:
    with pytest.raises(ValueError, match="expected max_batch and max_runs of at least 1, found 0 and 1"):
        StepOrder[str](max_batch=0, max_runs=1)
