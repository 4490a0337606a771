"""The next node and its batch, as tables."""

import pytest

from workers.stateless_engine.scheduler import BatchKey, MicroScheduler


def scheduler(**max_batch: int) -> MicroScheduler[int]:
    return MicroScheduler(max_batch)


def drained(of: MicroScheduler[int]) -> list[tuple[str, list[int]]]:
    taken = []
    while (batch := of.take()) is not None:
        taken.append(batch)
    return taken


def test_without_firings_no_node_is_next() -> None:
    assert scheduler(a=1).take() is None


def test_a_nodes_firings_are_taken_together_in_order_as_far_as_they_fit() -> None:
    one = scheduler(a=3)
    for firing in range(7):
        one.add("a", firing)

    assert drained(one) == [("a", [0, 1, 2]), ("a", [3, 4, 5]), ("a", [6])]
    assert len(one) == 0


def test_the_node_that_was_served_least_recently_is_next() -> None:
    one = scheduler(a=1, b=2, c=1)
    for firing in range(4):
        one.add("a", firing)
        one.add("b", firing)

    assert [one.take(), one.take(), one.take()] == [("a", [0]), ("b", [0, 1]), ("a", [1])]
    one.add("c", 9)  # it was never served
    assert drained(one) == [("c", [9]), ("b", [2, 3]), ("a", [2]), ("a", [3])]


def test_a_flood_of_one_node_delays_another_by_one_batch_at_most() -> None:
    one = scheduler(flood=4, rare=1)
    served: list[str] = []
    for firing in range(100):
        for _ in range(4):
            one.add("flood", firing)
        if firing % 3 == 0:
            one.add("rare", firing)
            since = len(served)
        batch = one.take()
        assert batch is not None
        served.append(batch[0])
        if firing % 3 == 1:
            assert "rare" in served[since : since + 2]


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'a': max_batch must be at least 1, found 0"):
        scheduler(a=0)


def test_only_firings_of_one_group_are_batched_and_the_others_keep_their_order() -> None:
    one = scheduler(a=3)
    for firing, group in enumerate("xyxyyx"):
        one.add("a", firing, BatchKey(group))

    assert drained(one) == [("a", [0, 2, 5]), ("a", [1, 3, 4])]


def test_a_batch_ends_before_the_firing_that_costs_too_much() -> None:
    one = MicroScheduler[int]({"a": 9}, {"a": 10.0})
    for firing, cost in enumerate([4.0, 6.0, 1.0, 50.0, 2.0, 3.0]):
        one.add("a", firing, BatchKey(cost=cost))

    assert drained(one) == [("a", [0, 1]), ("a", [2]), ("a", [3]), ("a", [4, 5])]


def test_the_first_firing_is_always_taken_so_that_none_waits_for_ever() -> None:
    one = MicroScheduler[str]({"a": 8}, {"a": 1.0})
    one.add("a", "dear", BatchKey("large", 100.0))
    for _ in range(8):
        one.add("a", "cheap", BatchKey("small", 0.1))

    assert one.take() == ("a", ["dear"])
    assert one.take() == ("a", ["cheap"] * 8)
