"""The records of a request are compared with the seals that list it, without the rest of the log."""

from collections.abc import Iterable, Mapping

import msgspec
import pytest

from shared.events import WorkerJoined, encode
from shared.log.port import StoredRecord
from shared.sealing import hashes, request_check
from shared.sealing.findings import Level
from shared.sealing.request_check import RequestReport
from tests.shared.sealing.sealed_log import (
    KEY,
    NAME,
    OTHER_KEY,
    SUBJECTS,
    SealedLog,
    two_requests,
    with_data,
    without,
)


def of(log: SealedLog, request_id: str) -> list[StoredRecord]:
    """The records that a bundle of the request has."""
    own = SUBJECTS.replayed(request_id)
    found = [one for one in log.records if _matches(one.subject, own)]
    while request_id not in found[-1].subject.split("."):
        found.pop()
    return found


def _matches(subject: str, filters: Iterable[str]) -> bool:
    tokens = subject.split(".")
    return any(
        len(tokens) == len(one.split("."))
        and all(mine in ("*", theirs) for mine, theirs in zip(one.split("."), tokens, strict=True))
        for one in filters
    )


def checked(
    records: Iterable[StoredRecord],
    seals: Iterable[StoredRecord],
    request_id: str = "second",
    *,
    trusted: frozenset[bytes] = frozenset({KEY.public}),
    left_out: Mapping[int, bytes | None] = {},
) -> RequestReport:
    (report,) = request_check.check(
        [request_id], records, seals, SUBJECTS, NAME, trusted=trusted, left_out=left_out
    )
    return report


def kinds(report: RequestReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def test_a_request_is_verified_with_its_own_records_alone() -> None:
    log = two_requests()
    report = checked(of(log, "second"), log.seals)
    assert (report.findings, report.records, report.sealed, report.is_sealed) == ([], 3, 3, True)


@pytest.mark.parametrize("seq", [7, 8, 9])
def test_changed_bytes_are_found(seq: int) -> None:
    log = two_requests()
    assert kinds(checked(with_data(of(log, "second"), seq, b"forged"), log.seals)) == ["changed_request"]


@pytest.mark.parametrize("seq", [7, 8, 9])
def test_a_removed_record_is_found(seq: int) -> None:
    log = two_requests()
    assert "changed_request" in kinds(checked(without(of(log, "second"), seq), log.seals))


def test_an_added_record_is_found() -> None:
    log = two_requests()
    forged = StoredRecord(8, SUBJECTS.output("nats", "second", "w1"), b"forged", 0)
    records = [*of(log, "second")[:3], forged, *of(log, "second")[4:]]
    assert kinds(checked(records, log.seals)) == ["changed_request"]


def test_a_changed_time_is_found() -> None:
    log = two_requests()
    records = [msgspec.structs.replace(one, time_ns=one.time_ns + 1) for one in of(log, "second")]
    assert "changed_request" in kinds(checked(records, log.seals))


def test_a_changed_record_of_a_worker_is_found() -> None:
    log = two_requests()
    assert kinds(checked(with_data(of(log, "second"), 2, b"forged"), log.seals)) == ["changed_member"]


def test_a_removed_record_of_an_epoch_is_found() -> None:
    log = two_requests()
    assert kinds(checked(without(of(log, "second"), 1), log.seals)) == ["changed_member"]


def test_without_seals_nothing_is_proven() -> None:
    report = checked(of(two_requests(), "second"), [])
    assert (kinds(report), report.level) == (["unsealed"], Level.UNPROVEN)


def test_without_the_seals_of_workers_not_everything_is_proven() -> None:
    log = two_requests()
    report = checked(of(log, "second"), log.seals[1:])
    assert (kinds(report), report.level) == (["unsealed", "unsealed", "missing_seals"], Level.UNPROVEN)


def test_an_open_request_is_not_sealed_yet() -> None:
    log = two_requests()
    log.request("third", ends=False)
    log.seal()
    assert kinds(checked(of(log, "third"), log.seals, "third")) == ["unsealed"]
    log.store(SUBJECTS.walk("third"))
    log.open.discard("third")
    log.seal()
    assert checked(of(log, "third"), log.seals, "third").is_sealed


def test_records_after_the_end_are_sealed_by_a_later_seal() -> None:
    log = two_requests()
    log.store(SUBJECTS.output("nats", "second", "w0"), b"late")
    assert kinds(checked(of(log, "second"), log.seals)) == ["unsealed"]
    log.seal()
    assert checked(of(log, "second"), log.seals).is_sealed


def test_a_seal_of_an_untrusted_key_proves_nothing() -> None:
    log = SealedLog(OTHER_KEY)
    log.request("second")
    log.seal()
    report = checked(of(log, "second"), log.seals)
    assert (kinds(report), report.level) == (["unknown_key"], Level.UNPROVEN)


def test_a_seal_of_another_log_is_found() -> None:
    log = two_requests()
    name = msgspec.structs.replace(NAME, created_ns=1)
    (report,) = request_check.check(
        ["second"], of(log, "second"), log.seals, SUBJECTS, name, trusted=frozenset({KEY.public})
    )
    assert report.level is Level.CHANGED


def test_memory_endpoints_are_not_part_of_the_seal() -> None:
    log = SealedLog()
    joined = WorkerJoined(rank=0, model="m", nodes=["n"], device="cpu", cards={"shm": b"secret"})
    log.store(SUBJECTS.worker(0), encode(joined))
    log.request("second")
    log.seal()
    masked = encode(msgspec.structs.replace(joined, cards={}))
    assert checked(of(log, "second"), log.seals).is_sealed
    assert checked(with_data(of(log, "second"), 1, masked), log.seals).is_sealed


def test_a_record_without_its_bytes_is_counted_by_its_leaf_but_not_proven() -> None:
    log = two_requests()
    records = with_data(of(log, "second"), 8, b"shorter")
    leaf = hashes.leaf(log.records[7])
    report = checked(records, log.seals, left_out={8: leaf})
    assert (kinds(report), report.level) == (["left_out"], Level.UNPROVEN)
    assert "changed_request" in kinds(checked(records, log.seals, left_out={8: bytes(32)}))


def test_a_record_of_an_epoch_cannot_be_left_out_together_with_its_seal() -> None:
    log = SealedLog()
    log.store(SUBJECTS.epoch, b"epoch")
    log.seal()
    log.store(SUBJECTS.worker(0), b"joined")
    log.request("second")
    log.seal()
    assert checked(of(log, "second"), log.seals).is_sealed
    report = checked(without(of(log, "second"), 1), log.seals[1:])
    assert (kinds(report), report.level) == (["missing_seals"], Level.UNPROVEN)


def test_what_the_server_wrote_on_the_subject_of_seals_does_no_harm() -> None:
    log = two_requests()
    reply = log.store(SUBJECTS.sealed, b'{"type":"io.nats.jetstream.api.v1.stream_info_response"}')
    assert checked(of(log, "second"), [*log.seals, reply]).is_sealed
