"""Verifies the records of requests, from a log or a bundle, against the seals that cover them. Pure.

A seal lists, of each request that is over, the number and the digest of its records. So a request is verified
without the rest of the log. The records of workers and epochs, on which it depends, are listed one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shared.log.port import StoredRecord
from shared.sealing import hashes, seals
from shared.sealing.findings import Finding, Level, worst
from shared.sealing.keys import fingerprint
from shared.sealing.seals import BadSealError, SealedRequest, SignedSeal
from shared.subjects import Subjects


class LogName(msgspec.Struct, frozen=True, kw_only=True):
    """The log that the records are from.

    Attributes:
        first_seq: the first record that the log still has, if they were read from it; 0 for a bundle.
    """

    stream: str
    created_ns: int
    first_seq: int = 0


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one request.

    Attributes:
        records: the number of its records.
        sealed: the number of those that equal what was sealed.
        keys: the public keys of the seals.
    """

    request_id: str
    records: int
    sealed: int
    keys: list[bytes]
    findings: list[Finding]

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def is_sealed(self) -> bool:
        """True if all records equal what was sealed with a trusted key."""
        return self.level is Level.NOTE


@dataclass(slots=True)
class _Subset:
    """The records at hand: the leaves of each request's, and of the membership's, by position."""

    requests: dict[str, dict[int, bytes]] = field(default_factory=dict)
    members: dict[int, bytes] = field(default_factory=dict)


def check(
    requests: Sequence[str],
    records: Iterable[StoredRecord],
    seal_records: Iterable[StoredRecord],
    subjects: Subjects,
    log: LogName,
    *,
    trusted: frozenset[bytes],
    left_out: Mapping[int, bytes | None] = {},
) -> list[RequestReport]:
    """Return a report for each of `requests`.

    Args:
        requests: the requests' ids.
        records: all their records, and all of workers and epochs up to the last of those.
        seal_records: the seals that cover them; others do no harm.
        subjects: the log's subjects.
        log: the log that the seals have to name.
        trusted: the public keys that are trusted.
        left_out: of records without some of their bytes, the leaf, if it is known.
    """
    subset = _subset(records, subjects, left_out)
    good, shared = _readable(seal_records, log, trusted)
    shared += _members(subset.members, good, _last(subset))
    shared += _links(good, _last(subset), log.first_seq)
    return [_request(one, subset.requests.get(one, {}), good, shared, left_out) for one in requests]


def _subset(
    records: Iterable[StoredRecord], subjects: Subjects, left_out: Mapping[int, bytes | None]
) -> _Subset:
    found = _Subset()
    for record in records:
        address = subjects.parse(record.subject)
        if address is None:
            continue
        leaf = left_out.get(record.seq)
        if address.request_id is not None:
            leaves = found.requests.setdefault(address.request_id, {})
            leaves[record.seq] = leaf or hashes.leaf(record)
        elif address.is_membership:
            found.members[record.seq] = hashes.leaf(hashes.without_endpoints(record))
    return found


def _last(subset: _Subset) -> int:
    return max((seq for leaves in subset.requests.values() for seq in leaves), default=0)


def _readable(
    records: Iterable[StoredRecord], log: LogName, trusted: frozenset[bytes]
) -> tuple[list[SignedSeal], list[Finding]]:
    good: list[SignedSeal] = []
    findings: list[Finding] = []
    for record in records:
        try:
            one = seals.read(record)
        except BadSealError as error:
            if not error.is_foreign:
                findings.append(Finding(kind="bad_seal", level=Level.CHANGED, text=str(error)))
            continue
        if (one.seal.stream, one.seal.created_ns) != (log.stream, log.created_ns):
            text = f"the seal in record {one.seq} was made for another log"
            findings.append(Finding(kind="wrong_log", level=Level.CHANGED, text=text))
            continue
        good.append(one)
    for key in dict.fromkeys(one.key for one in good if one.key not in trusted):
        text = f"sealed by key {fingerprint(key)}, which is not trusted here"
        findings.append(Finding(kind="unknown_key", level=Level.UNPROVEN, text=text))
    return good, findings


def _members(members: Mapping[int, bytes], good: Sequence[SignedSeal], last_seq: int) -> list[Finding]:
    """Compare the records of workers and epochs with the seals that cover them."""
    if not good:
        return []
    findings = []
    sealed = {seq: leaf for one in good for seq, leaf in one.seal.members.items() if seq <= last_seq}
    for seq in sorted(sealed.keys() | members.keys()):
        if seq in sealed and members.get(seq) == sealed[seq]:
            continue
        covered = any(one.seal.first_seq <= seq <= one.seal.last_seq for one in good)
        is_old = any(seq < one.seal.sealed_since for one in good)
        if covered:
            how = "is missing" if seq not in members else "is not as it was sealed"
            text = f"record {seq}, of a worker or an epoch, {how}"
            findings.append(_member(seq, "changed_member", Level.CHANGED, text))
        elif is_old:
            text = f"record {seq}, of a worker or an epoch, is older than sealing"
            findings.append(_member(seq, "older_than_sealing", Level.NOTE, text))
        else:
            text = f"record {seq}, of a worker or an epoch, is covered by no seal here"
            findings.append(_member(seq, "unsealed", Level.UNPROVEN, text))
    return findings


def _links(good: Sequence[SignedSeal], last_seq: int, log_begins: int) -> list[Finding]:
    """Follow the links between the records of workers and epochs: each seal names the last one before it."""
    listed = {seq for one in good for seq in one.seal.members}
    named = {one.seal.last_member for one in good} - listed - {0}
    return [
        _member(
            seq,
            "expired" if seq < log_begins else "missing_seals",
            Level.NOTE if seq < log_begins else Level.UNPROVEN,
            f"record {seq}, of a worker or an epoch, is not here, or its seal is not: it has expired, or it "
            "was removed",
        )
        for seq in sorted(named)
        if seq <= last_seq
    ]


def _member(seq: int, kind: str, level: Level, text: str) -> Finding:
    return Finding(kind=kind, level=level, text=text, first_seq=seq, last_seq=seq)


def _request(
    request_id: str,
    leaves: Mapping[int, bytes],
    good: Sequence[SignedSeal],
    shared: Sequence[Finding],
    left_out: Mapping[int, bytes | None],
) -> RequestReport:
    covered, findings = _compared(request_id, leaves, good)
    if not leaves:
        text = "there are no records of it: it was never submitted, or they were removed"
        findings.append(_unproven(request_id, "absent", text, []))
    rest = [seq for seq in leaves if seq not in covered]
    if rest:
        findings.append(_unsealed(request_id, rest, good, is_whole=not covered))
    gone = [seq for seq in leaves if seq in left_out]
    if gone:
        text = f"{len(gone)} records lack some of their bytes here, which cannot be verified"
        findings.append(_unproven(request_id, "left_out", text, gone))
    return RequestReport(
        request_id=request_id,
        records=len(leaves),
        sealed=len(covered),
        keys=list(dict.fromkeys(one.key for one in good)),
        findings=[*shared, *findings],
    )


def _compared(
    request_id: str, leaves: Mapping[int, bytes], good: Sequence[SignedSeal]
) -> tuple[set[int], list[Finding]]:
    """Compare a request's records with its entries in seals; return those that the entries cover."""
    covered: set[int] = set()
    findings: list[Finding] = []
    entries = {
        (entry.first_seq, entry.last_seq, entry.digest): entry
        for one in good
        for entry in one.seal.requests
        if entry.request_id == request_id
    }
    for entry in entries.values():
        part = [seq for seq in leaves if entry.first_seq <= seq <= entry.last_seq]
        covered.update(part)
        if (difference := _difference(entry, [leaves[seq] for seq in part])) is not None:
            findings.append(
                Finding(
                    kind="changed_request",
                    level=Level.CHANGED,
                    text=difference,
                    first_seq=entry.first_seq,
                    last_seq=entry.last_seq,
                    request_id=request_id,
                )
            )
    return covered, findings


def _difference(entry: SealedRequest, leaves: Sequence[bytes]) -> str | None:
    if len(leaves) != entry.count:
        return f"not as it was sealed: {entry.count} records were sealed, {len(leaves)} are here"
    digest = hashes.of_request()
    for leaf in leaves:
        digest.update(leaf)
    return None if digest.digest() == entry.digest else "not as it was sealed: its records differ"


def _unsealed(request_id: str, rest: Sequence[int], good: Sequence[SignedSeal], *, is_whole: bool) -> Finding:
    is_old = bool(good) and rest[-1] < min(one.seal.sealed_since for one in good)
    if is_old:
        text = "older than sealing"
    elif is_whole:
        text = "not sealed"
    else:
        text = f"not sealed from record {rest[0]} on ({len(rest)} records)"
    return _unproven(request_id, "older_than_sealing" if is_old else "unsealed", text, rest)


def _unproven(request_id: str, kind: str, text: str, records: Sequence[int]) -> Finding:
    first_seq, last_seq = (records[0], records[-1]) if records else (0, 0)
    return Finding(
        kind=kind,
        level=Level.UNPROVEN,
        text=text,
        first_seq=first_seq,
        last_seq=last_seq,
        request_id=request_id,
    )
