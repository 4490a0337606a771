"""Every change of a sealed log is found, and named with the records that it is in."""

from collections.abc import Iterable, Sequence

import msgspec
import pytest

from shared.events import LogSealed, decode, encode
from shared.log.port import StoredRecord
from shared.sealing import anchors, seals
from shared.sealing.anchors import Anchor
from shared.sealing.findings import Level, worst
from shared.sealing.log_check import LogCheck, LogExtent, LogReport
from tests.shared.sealing.sealed_log import (
    CREATED_NS,
    KEY,
    OTHER_KEY,
    SUBJECTS,
    SealedLog,
    two_requests,
    with_data,
    without,
)


def checked(
    records: Iterable[StoredRecord],
    extent: LogExtent,
    *,
    trusted: frozenset[bytes] = frozenset({KEY.public}),
    kept: Sequence[Anchor] = (),
) -> LogReport:
    found = list(records)
    own = [record for record in found if record.subject == SUBJECTS.sealed]
    check = LogCheck(extent, own, SUBJECTS, trusted=trusted, anchors=kept)
    for record in found:
        check.take(record)
    return check.report()


def kinds(report: LogReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def anchors_of(log: SealedLog) -> list[Anchor]:
    return [anchors.anchor_of(seals.read(record)) for record in log.seals]


def test_an_untouched_log_is_intact() -> None:
    log = two_requests()
    report = checked(log.records, log.extent(), kept=anchors_of(log))
    assert (report.findings, report.seals, report.sealed, report.anchors) == ([], 2, 9, 2)


def test_records_after_the_last_seal_are_named() -> None:
    log = two_requests()
    log.request("third")
    (finding,) = checked(log.records, log.extent()).findings
    assert (finding.kind, finding.level, finding.first_seq, finding.last_seq) == (
        "unsealed_tail",
        Level.NOTE,
        11,
        13,
    )


@pytest.mark.parametrize("seq", [1, 2, 3, 5, 7, 9])
def test_changed_bytes_are_found_in_their_segment(seq: int) -> None:
    log = two_requests()
    report = checked(with_data(log.records, seq, b"forged"), log.extent())
    (finding,) = [one for one in report.findings if one.kind == "changed_segment"]
    assert finding.first_seq <= seq <= finding.last_seq
    assert worst(report.findings) is Level.CHANGED


def test_a_changed_request_is_named() -> None:
    log = two_requests()
    report = checked(with_data(log.records, 8, b"forged"), log.extent())
    assert [one.request_id for one in report.findings if one.kind == "changed_request"] == ["second"]


def test_a_changed_time_is_found() -> None:
    log = two_requests()
    records = [
        msgspec.structs.replace(one, time_ns=one.time_ns + 1) if one.seq == 4 else one for one in log.records
    ]
    assert "changed_segment" in kinds(checked(records, log.extent()))


def test_a_moved_subject_is_found() -> None:
    log = two_requests()
    records = [
        msgspec.structs.replace(one, subject=SUBJECTS.walk("other")) if one.seq == 5 else one
        for one in log.records
    ]
    assert "changed_segment" in kinds(checked(records, log.extent()))


@pytest.mark.parametrize("gone", [(4,), (3, 4, 5), (7, 8, 9), (1,)])
def test_removed_records_are_found(gone: tuple[int, ...]) -> None:
    log = two_requests()
    assert "changed_segment" in kinds(checked(without(log.records, *gone), log.extent()))


def test_a_removed_seal_is_found() -> None:
    log = two_requests()
    log.request("third")
    log.seal()
    assert "missing_seals" in kinds(checked(without(log.records, 10), log.extent()))


def test_the_removal_of_the_first_seal_is_found() -> None:
    log = two_requests()
    assert "missing_seals" in kinds(checked(without(log.records, 6), log.extent()))


def test_a_log_without_its_seals_proves_nothing() -> None:
    log = two_requests()
    report = checked(without(log.records, 6, 10), log.extent())
    assert (kinds(report), worst(report.findings)) == (["unsealed"], Level.UNPROVEN)


def test_an_anchor_shows_that_the_seals_were_removed() -> None:
    log = two_requests()
    report = checked(without(log.records, 6, 10), log.extent(), kept=anchors_of(log))
    assert "truncated" in kinds(report)


def test_an_anchor_shows_that_the_tail_was_removed() -> None:
    log = two_requests()
    kept = anchors_of(log)
    log.records = log.records[:6]
    assert checked(log.records, log.extent()).findings == []
    (finding,) = checked(log.records, log.extent(), kept=kept).findings
    assert (finding.kind, finding.level, finding.last_seq) == ("truncated", Level.CHANGED, 9)


def test_an_anchor_shows_a_history_that_was_signed_again_with_the_same_key() -> None:
    forged = SealedLog()
    for record in two_requests().records:
        if record.subject == SUBJECTS.sealed:
            forged.seal()
        else:
            forged.store(record.subject, b"forged" if record.seq == 4 else record.data)
    assert checked(forged.records, forged.extent()).findings == []
    report = checked(forged.records, forged.extent(), kept=anchors_of(two_requests()))
    assert (kinds(report), worst(report.findings)) == (["other_history"], Level.CHANGED)


def test_a_history_that_was_signed_with_another_key_is_not_trusted() -> None:
    forged = SealedLog(OTHER_KEY)
    forged.request("first")
    forged.seal()
    report = checked(forged.records, forged.extent())
    assert (kinds(report), worst(report.findings)) == (["unknown_key"], Level.UNPROVEN)
    both = frozenset({KEY.public, OTHER_KEY.public})
    assert checked(forged.records, forged.extent(), trusted=both).findings == []


def test_a_forged_signature_is_found() -> None:
    log = two_requests()
    event = decode(log.seals[0].data)
    assert isinstance(event, LogSealed)
    forged = msgspec.structs.replace(event, signature=bytes(64))
    report = checked(with_data(log.records, 6, encode(forged)), log.extent())
    assert "bad_seal" in kinds(report)


def test_a_seal_of_another_log_is_found() -> None:
    log = two_requests()
    extent = msgspec.structs.replace(log.extent(), created_ns=CREATED_NS + 1)
    assert kinds(checked(log.records, extent)) == ["wrong_log", "wrong_log", "unsealed"]


def test_expired_records_are_explained_by_the_retention() -> None:
    log = two_requests()
    extent = log.extent(first_seq=6, now_s=7200)
    report = checked(log.records[5:], extent, kept=anchors_of(log))
    assert (kinds(report), worst(report.findings)) == (["expired"], Level.NOTE)
    assert report.sealed == 4


def test_a_partly_expired_segment_does_not_count_as_changed() -> None:
    log = two_requests()
    report = checked(log.records[7:], log.extent(first_seq=8, now_s=7200))
    assert (kinds(report), worst(report.findings)) == (["expired", "partly_expired"], Level.NOTE)


def test_records_that_vanish_before_their_time_were_removed() -> None:
    log = two_requests()
    report = checked(log.records[6:], log.extent(first_seq=7))
    assert (kinds(report), worst(report.findings)) == (["removed"], Level.CHANGED)


def test_records_before_the_first_seal_are_older_than_sealing() -> None:
    log = SealedLog(first_seq=4)
    log.request("old")
    log.request("new")
    log.seal()
    (finding,) = checked(log.records, log.extent()).findings
    assert (finding.kind, finding.level, finding.first_seq, finding.last_seq) == (
        "older_than_sealing",
        Level.NOTE,
        1,
        3,
    )


def test_records_that_expired_unsealed_leave_a_signed_gap() -> None:
    log = log_with_a_gap()
    (finding,) = checked(log.records, log.extent()).findings
    assert (finding.kind, finding.level, finding.first_seq, finding.last_seq) == ("gap", Level.NOTE, 4, 6)


def test_nothing_can_be_inserted_into_a_gap() -> None:
    log = log_with_a_gap()
    forged = StoredRecord(5, SUBJECTS.walk("first"), b"forged", 0)
    report = checked(sorted([*log.records, forged], key=lambda one: one.seq), log.extent())
    assert "inserted" in kinds(report)


def log_with_a_gap() -> SealedLog:
    log = SealedLog()
    log.request("first")
    seal = log.segment.draft(set(), 3)
    log.segment.stored(seal)
    log.expire(3)
    log.store(SUBJECTS.sealed, encode(seals.signed(seal, KEY, epoch=1)))
    log.request("second")
    log.seal()
    return log


def test_what_the_server_wrote_on_the_subject_of_seals_is_a_note() -> None:
    log = two_requests()
    log.store(SUBJECTS.sealed, b'{"type":"io.nats.jetstream.api.v1.stream_info_response"}')
    log.request("third")
    log.seal()
    report = checked(log.records, log.extent())
    assert (kinds(report), worst(report.findings)) == (["foreign"], Level.NOTE)


def test_records_that_vanish_after_a_quiet_time_were_removed() -> None:
    """The segment before is older than the retention; the removed request is not."""
    log = SealedLog()
    log.request("old")
    log.seal()
    log.quiet(7200)
    log.request("new")
    log.seal()
    report = checked(log.records[5:], log.extent(first_seq=6))
    assert ("removed", Level.CHANGED) in [(one.kind, one.level) for one in report.findings]


def test_a_worker_of_a_partly_expired_segment_is_still_compared() -> None:
    log = two_requests()
    extent = log.extent(first_seq=2, now_s=7200)
    assert worst(checked(log.records[1:], extent).findings) is Level.NOTE
    report = checked(with_data(log.records[1:], 2, b"forged"), extent)
    assert "changed_member" in kinds(report)


def test_a_rolled_back_log_that_went_on_is_found_by_an_early_anchor() -> None:
    log, kept = SealedLog(), anchors_of(two_requests())
    log.request("first")
    for request_id in ("third", "fourth", "fifth"):
        log.request(request_id)
        log.seal()
    report = checked(log.records, log.extent(), kept=[*kept, *anchors_of(log)])
    assert worst(report.findings) is Level.CHANGED
