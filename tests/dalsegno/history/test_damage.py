"""The requests that missing records may belong to."""

import pytest

from dalsegno.history.damage import Damage
from shared.events import Event, Inputs, RequestCancelled, RequestSubmitted, encode
from shared.log.port import MissingRecords, StoredRecord
from shared.subjects import Subjects

SUBJECTS = Subjects()
CANCELLED = RequestCancelled(id="r.end", request_id="r", reason="", history=b"")


def record(seq: int, subject: str, event: Event) -> StoredRecord:
    return StoredRecord(seq, subject, encode(event), seq)


def damage(first_seq: int, last_seq: int, *, ends: bool) -> dict[str, str]:
    found = Damage((MissingRecords(first_seq, last_seq, "2.blk is missing"),), SUBJECTS)
    submitted = RequestSubmitted(request_id="r", model="m", inputs=Inputs(text="x"))
    found.take(record(10, SUBJECTS.request("r"), submitted))
    if ends:
        found.take(record(20, SUBJECTS.walk("r"), CANCELLED))
    return found.of(["r"])


@pytest.mark.parametrize(
    ("first_seq", "last_seq", "ends", "is_damaged"),
    [
        (1, 9, True, False),
        (21, 30, True, False),
        (21, 30, False, True),
        (12, 13, True, True),
        (1, 9, False, False),
    ],
)
def test_a_request_is_damaged_if_records_between_its_submission_and_its_end_are_missing(
    first_seq: int, last_seq: int, *, ends: bool, is_damaged: bool
) -> None:
    found = damage(first_seq, last_seq, ends=ends)
    assert bool(found) is is_damaged
    assert not found or f"records {first_seq} to {last_seq} are missing: 2.blk" in found["r"]


def test_a_request_of_a_damaged_log_that_is_not_there_is_damaged() -> None:
    assert list(Damage((MissingRecords(1, 2, "x"),), SUBJECTS).of(["r"])) == ["r"]


def test_without_missing_records_no_request_is_damaged() -> None:
    found = Damage((), SUBJECTS)
    found.take(record(1, SUBJECTS.walk("r"), CANCELLED))
    assert found.of(["r", "another"]) == {}
