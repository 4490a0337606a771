"""Time limits by the log's clock, which is not ours: a clock in the hand."""

from conductor.core.react import Deadline
from conductor.timers import Timers

S = 1_000_000_000
BORN_NS = 1_700_000_000 * S
"""What the log's clock says when ours says 0."""


def limit(at_s: float, request_id: str = "r1", step: int | None = None) -> Deadline:
    return Deadline(BORN_NS + round(at_s * S), request_id, 1, step)


def timers(*, at_s: float = 0.0) -> Timers:
    """One that has just read a record, stored that very moment."""
    made = Timers()
    made.read(1, BORN_NS + round(at_s * S), at_s)
    return made


def test_a_limit_is_due_when_the_logs_clock_has_reached_it() -> None:
    watch = timers()
    assert watch.due([limit(5)], 4.9) == []
    assert watch.due([limit(5)], 5.0) == [limit(5)]


def test_what_is_on_its_way_is_not_said_twice() -> None:
    watch = timers()
    watch.mark_sent(limit(5))
    assert watch.due([limit(5)], 6.0) == []
    watch.stored(limit(5), 2)
    assert watch.due([limit(5)], 7.0) == []  # stored, and not read yet


def test_one_that_was_stored_too_early_is_said_again_after_the_rest() -> None:
    """The log's clock went back by 2 s: it stored at 3 what was due at 5."""
    watch = timers()
    watch.mark_sent(limit(5))
    watch.stored(limit(5), 2)
    watch.read(2, BORN_NS + 3 * S, 5.1)
    assert watch.due([limit(5)], 5.2) == []
    assert watch.due([limit(5)], 7.0) == []
    assert watch.due([limit(5)], 7.1) == [limit(5)]


def test_its_ack_may_come_later_than_the_record() -> None:
    watch = timers()
    watch.mark_sent(limit(5))
    watch.read(2, BORN_NS + 3 * S, 5.1)
    assert watch.due([limit(5)], 6.0) == []
    watch.stored(limit(5), 2)
    assert watch.due([limit(5)], 7.0) == []
    assert watch.due([limit(5)], 7.1) == [limit(5)]


def test_a_record_that_came_late_does_not_set_the_clock_back() -> None:
    watch = timers()
    watch.read(2, BORN_NS + 1 * S, 4.0)  # stored at 1, read at 4
    assert watch.due([limit(5)], 5.0) == [limit(5)]


def test_the_logs_past_does_not_tell_the_time() -> None:
    """A conductor that starts reads records an hour old; the one it stores itself is of now."""
    watch = Timers()
    watch.read(1, BORN_NS - 3_600 * S, 0.0)
    assert watch.due([limit(5)], 10.0) == []
    watch.read(2, BORN_NS + 10 * S, 10.0)
    assert watch.due([limit(5)], 10.0) == [limit(5)]


def test_without_a_record_there_is_no_time() -> None:
    assert Timers().due([limit(0)], 1e6) == []


def test_limits_of_a_request_and_of_its_steps_are_told_apart() -> None:
    watch = timers()
    watch.mark_sent(limit(5))
    assert watch.due([limit(5), limit(5, step=0), limit(5, "r2")], 6.0) == [limit(5, step=0), limit(5, "r2")]


def test_what_an_earlier_term_said_may_be_void() -> None:
    watch = timers()
    watch.mark_sent(limit(5))
    watch.start_term()
    assert watch.due([limit(5)], 6.0) == [limit(5)]


def test_limits_that_are_gone_are_forgotten() -> None:
    watch = timers()
    for number in range(100):
        watch.mark_sent(limit(5, f"r{number}"))
    watch.due([limit(5, "r99")], 6.0)
    assert list(watch._sent) == [limit(5, "r99")]
    watch.stored(limit(5, "r1"), 9)
    assert list(watch._sent) == [limit(5, "r99")]


def test_the_next_limit_is_the_earliest_that_nobody_said_to_be_over() -> None:
    watch = timers()
    assert watch.next_s([limit(7), limit(5), limit(6)], 1.5) == 3.5
    watch.mark_sent(limit(5))
    assert watch.next_s([limit(7), limit(5), limit(6)], 1.5) == 4.5
    assert watch.next_s([limit(5)], 1.5) is None


def test_a_limit_that_is_over_is_not_waited_for() -> None:
    assert timers().next_s([limit(5)], 6.0) == 0


def test_there_is_no_next_limit_without_one_or_before_anything_was_read() -> None:
    assert timers().next_s([], 1.0) is None
    assert Timers().next_s([limit(5)], 1.0) is None
