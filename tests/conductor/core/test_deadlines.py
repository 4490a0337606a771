"""Time limits: the log's time has the last word."""

import msgspec
import pytest

from conductor.core.lifecycle import Phase
from conductor.core.react import Deadline
from shared.events import DeadlinePassed, Event, NodeReady, RequestFailed, WalkStop, encode
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import LIMITS, SUBJECTS, Script, deployment

MS = 1_000_000
"""A record's time in `Script`: so many nanoseconds for each position."""


def passed(script: Script, deadline: Deadline, at_ns: int, **changes: object) -> None:
    """The conductor's clock says that a limit is over; the log stores it at `at_ns`."""
    event: Event = DeadlinePassed(
        id=f"{deadline.request_id}.deadline.{len(script.records)}",
        writer=CONDUCTOR_WRITER,
        epoch=script.cluster.fence.epoch,
        request_id=deadline.request_id,
        attempt=deadline.attempt,
        step=deadline.step,
        deadline_ns=deadline.at_ns,
    )
    event = msgspec.structs.replace(event, **changes)
    seq = len(script.records) + 1
    script.records.append(StoredRecord(seq, SUBJECTS.walk(deadline.request_id), encode(event), at_ns))
    script.settle()


def limited(**walks: float) -> Script:
    limits = msgspec.structs.replace(LIMITS, walk_timeouts_s=walks)
    script = Script(serve=deployment(limits=limits))
    script.open_epoch()
    script.join()
    return script


def test_a_request_without_a_limit_has_none() -> None:
    script = limited()
    script.submit()
    assert script.cluster.deadlines() == []


def test_a_request_fails_when_its_time_is_over_and_its_ranks_are_told_to_stop() -> None:
    script = limited()
    seq = script.submit(timeout_s=2.5)
    (deadline,) = script.cluster.deadlines()
    assert deadline == Deadline(seq * MS + 2_500 * MS, "r1", 1)
    passed(script, deadline, deadline.at_ns)
    failure = script.last(RequestFailed).failure
    assert (failure.code, failure.status) == ("deadline_exceeded", 504)
    assert "2.5 s" in failure.message
    assert len(script.events(WalkStop)) == 1
    assert script.cluster.deadlines() == []


def test_a_limit_counts_while_a_request_waits_and_while_it_is_held() -> None:
    waiting = Script()
    waiting.open_epoch()
    waiting.submit(timeout_s=1)
    passed(waiting, waiting.cluster.deadlines()[0], 10**12)
    assert waiting.request().phase is Phase.FAILED

    held = limited()
    held.submit(timeout_s=1)
    held.lose(0)
    assert held.request().phase is Phase.HELD
    passed(held, held.cluster.deadlines()[0], 10**12)
    assert held.request().phase is Phase.FAILED


def test_said_too_early_by_the_logs_time_it_is_void() -> None:
    script = limited()
    script.submit(timeout_s=1)
    (deadline,) = script.cluster.deadlines()
    passed(script, deadline, deadline.at_ns - 1)
    assert script.request().phase is Phase.RUNNING
    passed(script, deadline, deadline.at_ns, deadline_ns=deadline.at_ns - 1)  # not the limit there is
    assert script.request().phase is Phase.RUNNING
    assert script.cluster.deadlines() == [deadline]


def test_what_ended_before_stays_ended() -> None:
    script = limited()
    script.submit(timeout_s=1)
    (deadline,) = script.cluster.deadlines()
    script.run_to_the_end()
    passed(script, deadline, 10**12)
    assert script.request().phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("walks", "expected_s"),
    [({"prefill": 1.0, "decode": 2.0}, 3.0), ({"prefill": 1.0}, None), ({"prepare": 1.0}, None)],
)
def test_a_step_may_take_what_its_walks_may_together(
    walks: dict[str, float], expected_s: float | None
) -> None:
    script = limited(**walks)
    script.submit()
    script.complete(script.last(NodeReady))
    order = next(r for r in script.records if r.data.find(b"r1.ready.1.1.0") >= 0)
    expected = [] if expected_s is None else [Deadline(order.time_ns + round(expected_s * 1e9), "r1", 1, 1)]
    assert script.cluster.deadlines() == expected


def test_a_steps_limit_begins_with_each_attempt_anew() -> None:
    script = limited(prepare=1)
    script.submit()
    (first,) = script.cluster.deadlines()
    script.lose(0)
    assert script.cluster.deadlines() == []
    script.join("w0-b")
    (second,) = script.cluster.deadlines()
    assert (second.attempt, second.step) == (2, 0)
    assert second.at_ns > first.at_ns
    passed(script, first, 10**12)
    assert script.request().phase is Phase.RUNNING
    passed(script, second, 10**12)
    failure = script.last(RequestFailed).failure
    assert failure.message == "step 0 (prepare) took longer than 1 s"
