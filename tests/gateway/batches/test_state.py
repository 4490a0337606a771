"""The state of a batch, by its events."""

from gateway.batches.state import BatchState, digests_of, fold_records
from shared.events import (
    BatchCancelled,
    BatchChecked,
    BatchClaimed,
    BatchCreated,
    BatchEnded,
    BatchEvent,
    RequestCancel,
    SegmentStored,
    encode,
)
from shared.log.port import StoredRecord
from shared.subjects import Subjects

SUBJECTS = Subjects()
S = 1_000_000_000
CREATED = BatchCreated(
    id="c",
    writer="g-1",
    endpoint="/v1/embeddings",
    input="0" * 64,
    window="24h",
    created_s=1,
    expires_s=86401,
    tenant="anna",
)


def stored(segment: int, completed: int, failed: int = 0, expired: int = 0) -> SegmentStored:
    return SegmentStored(
        id=f"s{segment}",
        writer="g-1",
        segment=segment,
        completed=completed,
        failed=failed,
        expired=expired,
        output=f"{segment}a" + "0" * 62 if completed else None,
        errors=f"{segment}e" + "0" * 62 if failed else None,
    )


def folded(*events: BatchEvent) -> BatchState:
    state = BatchState("b")
    for seq, event in enumerate(events, 1):
        state.fold(seq, seq * S, event)
    return state


CHECKED = BatchChecked(id="k", writer="g-1", lines=502)
CANCELLED = BatchCancelled(id="x", writer="g-2")
ENDED = BatchEnded(id="e", writer="g-1", status="completed", output="f" * 64)


def test_the_status_follows_from_the_events() -> None:
    events: list[BatchEvent] = [CREATED, CHECKED, stored(1, 2), stored(0, 499, 1), ENDED]
    found = [folded(*events[:count]).status for count in range(1, 6)]

    assert found == ["validating", "in_progress", "in_progress", "finalizing", "completed"]
    assert folded(*events).times_s == {"validating": 1, "in_progress": 2, "finalizing": 4, "completed": 5}


def test_a_cancelled_batch_is_cancelling_until_its_end() -> None:
    state = folded(CREATED, CHECKED, CANCELLED, stored(0, 500), stored(1, 0, 2))

    assert state.status == "cancelling"
    assert (state.completed, state.failed) == (500, 2)


def test_the_first_end_counts() -> None:
    again = BatchEnded(id="e2", writer="g-2", status="failed")
    state = folded(CREATED, CHECKED, ENDED, again, CANCELLED, stored(0, 5))

    assert (state.status, state.segments, state.is_cancelled) == ("completed", {}, False)
    assert state.last_seq == 6


def test_a_repeated_segment_and_a_repeated_event_change_nothing() -> None:
    state = folded(CREATED, CHECKED, stored(0, 500), stored(0, 500), SegmentStored(
        id="other", writer="g-2", segment=0, completed=1, failed=499,
    ))  # fmt: skip

    assert (state.completed, state.failed) == (500, 0)


def test_the_last_claim_names_the_owner() -> None:
    assert folded(CREATED).owner == "g-1"
    assert folded(CREATED, BatchClaimed(id="1", writer="g-2")).owner == "g-2"


def test_parts_are_in_the_order_of_the_lines() -> None:
    segments = [stored(2, 1, 1), stored(0, 1), stored(1, 0, 1)]

    assert [one[:2] for one in digests_of(segments, is_error=False)] == ["0a", "2a"]
    assert [one[:2] for one in digests_of(segments, is_error=True)] == ["1e", "2e"]


def test_records_that_are_no_events_of_batches_are_left_out() -> None:
    states: dict[str, BatchState] = {}
    for seq, data in enumerate((b"{}", encode(RequestCancel(request_id="r")), encode(CREATED)), 1):
        fold_records(states, StoredRecord(seq, SUBJECTS.batch("b"), data, seq), SUBJECTS)

    assert list(states) == ["b"]
    assert states["b"].created_seq == 3
