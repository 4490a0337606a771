"""The segment: its limits."""

from shared.sealing.segment import MAX_REQUESTS
from tests.shared.sealing.sealed_log import SUBJECTS, SealedLog


def test_a_flood_of_ids_that_are_no_requests_is_listed_as_fast_as_it_comes() -> None:
    log = SealedLog()
    listed = 0
    for number in range(3 * MAX_REQUESTS):
        log.store(SUBJECTS.control(f"r{number}"))
        if log.segment.is_full:
            listed += len(log.seal().requests)
    assert listed == 3 * MAX_REQUESTS


def test_a_request_that_was_cancelled_before_its_submission_is_listed_as_a_whole() -> None:
    log = SealedLog()
    known = log.store(SUBJECTS.control("r1")).seq
    log.store(SUBJECTS.request("r1"))
    assert log.segment.draft((), known).requests == []
    log.store(SUBJECTS.walk("r1"))
    (entry,) = log.seal().requests
    assert (entry.first_seq, entry.last_seq, entry.count) == (1, 3, 3)
