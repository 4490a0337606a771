from shared.events import NodeFired, StreamSent
from workers.orders.out_of_order_buffer import OutOfOrderBuffer, ReceivedEdge


def fired(number: int, attempt: int = 1) -> ReceivedEdge:
    return ReceivedEdge(NodeFired(attempt=attempt, index=number, walk=0, node="n", path=()), 1)


def take_all(early: OutOfOrderBuffer, request_id: str) -> list[ReceivedEdge]:
    return early.take(request_id, lambda _: True)


def test_what_is_wanted_is_taken_in_its_order_and_once() -> None:
    early = OutOfOrderBuffer()
    for number in (2, 0, 1):
        early.add("r", fired(number), 10)

    assert early.take("r", lambda heard: heard.event.index != 0) == [fired(2), fired(1)]
    assert take_all(early, "r") == [fired(0)]
    assert take_all(early, "r") == []
    assert (early.count, early.nbytes) == (0, 0)


def test_requests_do_not_touch_one_another_and_an_end_forgets() -> None:
    early = OutOfOrderBuffer()
    early.add("r", fired(0), 10)
    early.add("q", fired(1), 10)
    early.end("r")

    assert take_all(early, "r") == []
    assert (early.count, early.nbytes) == (1, 10)
    assert take_all(early, "q") == [fired(1)]


def test_a_higher_attempt_ends_what_waits_for_lower_ones() -> None:
    early = OutOfOrderBuffer()
    for attempt in (1, 2, 3):
        early.add("r", fired(0, attempt), 10)
    early.begin("r", 2)

    assert take_all(early, "r") == [fired(0, 2), fired(0, 3)]


def test_an_edge_too_many_takes_its_attempts_others_with_it_and_is_remembered() -> None:
    early = OutOfOrderBuffer(max_per_request=2)
    early.add("r", fired(0, attempt=2), 10)
    early.add("r", fired(1), 10)
    early.add("r", fired(2), 10)
    early.add("r", fired(3), 10)

    assert "3 edges (3 for all requests)" in early.refused("r", 1, {1})
    assert early.refused("r", 2, {1}) == early.refused("q", 1, {1}) == ""
    assert take_all(early, "r") == [fired(0, attempt=2)]
    assert early.refused("r", 1, {1})
    early.begin("r", 2)
    assert not early.refused("r", 1, {1})


def test_bytes_are_bounded_too_of_a_request_and_of_all() -> None:
    early = OutOfOrderBuffer(max_bytes_per_request=100, max_bytes_in_all=150)
    early.add("r", fired(0), 90)
    early.add("q", fired(0), 60)
    early.add("q", fired(1), 1)
    early.add("r", fired(1), 11)

    assert "61 bytes of edges (151 for all requests)" in early.refused("q", 1, {1})
    assert "101 bytes" in early.refused("r", 1, {1})
    assert (early.count, early.nbytes) == (0, 0)


def test_a_sender_that_floods_takes_no_other_senders_room() -> None:
    early = OutOfOrderBuffer(max_per_request=2, max_in_all=3)
    for number in range(9):
        early.add("r", ReceivedEdge(fired(number).event, 2), 10)
    early.add("r", fired(0), 10)

    assert early.refused("r", 1, {0, 1}) == ""
    assert "rank 2 sent 3 edges" in early.refused("r", 1, {1, 2})
    assert take_all(early, "r") == [fired(0)]


def test_all_requests_together_are_bounded() -> None:
    early = OutOfOrderBuffer(max_in_all=2)
    for name in ("a", "b", "c"):
        early.add(name, ReceivedEdge(StreamSent(attempt=1, stream="s", to="n"), 1), 1)

    assert not early.refused("a", 1, {1})
    assert early.refused("c", 1, {1})
    assert early.count == 2
