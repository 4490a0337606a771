"""The next node and its batch, as tables."""

import pytest

from workers.stateless_engine.scheduler import MicroScheduler


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
