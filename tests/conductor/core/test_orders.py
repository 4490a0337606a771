"""Reports of the ranks of a step become one result."""

from typing import Any

from conductor.core.orders import merged
from shared.events import WalkResult


def result(**facts: Any) -> tuple[WalkResult, ...]:
    return (WalkResult(name="draw", facts=facts, outputs={}),)


def test_what_ranks_have_counted_is_added_up() -> None:
    found = merged(
        {
            0: result(counts={"forwards": 5, "rounds": 2}, tokens=3),
            1: result(counts={"forwards": 4}),
            2: result(counts={"forwards": 4}),
        }
    )

    assert found == result(counts={"forwards": 13, "rounds": 2}, tokens=3)


def test_counts_of_one_rank_stay_as_they_are() -> None:
    assert merged({0: result(counts={"forwards": 5}), 1: result()}) == result(counts={"forwards": 5})


def test_other_facts_have_to_be_equal() -> None:
    conflict = merged({0: result(tokens=3), 1: result(tokens=4)})

    assert isinstance(conflict, str)
    assert "rank 1 reports the fact 'tokens' otherwise than another rank" in conflict


def test_counts_that_are_no_numbers_are_a_conflict() -> None:
    assert isinstance(merged({0: result(counts={"forwards": 5}), 1: result(counts="many")}), str)
