"""Verifies a whole log against its seals and anchors. Pure: a fold over all records in log order.

The seals are given first, so that one pass over the records needs no memory of them. A chain value covers all
records before it, so each segment is compared by itself, and the seals with one another by their links.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shared.log.port import StoredRecord
from shared.sealing import hashes, seals
from shared.sealing.anchors import Anchor
from shared.sealing.findings import Finding, Level
from shared.sealing.keys import fingerprint
from shared.sealing.seals import BadSealError, Seal, SealedRequest, SignedSeal
from shared.subjects import Subjects

_CLOCKS_S: Final = 600.0
"""The difference allowed between this machine's clock and the log's."""


class LogExtent(msgspec.Struct, frozen=True, kw_only=True):
    """The log as it is found, and the time of the verification."""

    stream: str
    created_ns: int
    first_seq: int
    last_seq: int
    now_ns: int


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    Attributes:
        seals: the number of seals with a valid signature.
        sealed: the number of records that equal what was sealed.
        last_sealed_ns: the time of the last sealed record; 0 without seals.
        keys: the public keys of the seals.
        anchors: the number of anchors of this log that were compared.
    """

    findings: list[Finding]
    seals: int
    sealed: int
    last_sealed_ns: int
    keys: list[bytes]
    anchors: int


@dataclass(slots=True)
class _Entry:
    """A sealed request while its records are read."""

    sealed: SealedRequest
    count: int = 0
    digest: Any = field(default_factory=hashes.of_request)


@dataclass(slots=True)
class _Span:
    """Some records: their number, the first and the last one."""

    count: int = 0
    first: int = 0
    last: int = 0

    def add(self, seq: int) -> None:
        self.count, self.first, self.last = self.count + 1, self.first or seq, seq


class LogCheck:
    """The fold. Call `take` with every record of the log, then `report`."""

    def __init__(
        self,
        extent: LogExtent,
        seal_records: Iterable[StoredRecord],
        subjects: Subjects,
        *,
        trusted: frozenset[bytes],
        anchors: Sequence[Anchor] = (),
    ) -> None:
        self._extent = extent
        self._subjects = subjects
        self._trusted = trusted
        self._findings: list[Finding] = []
        self._seals = self._readable(seal_records)
        self._chain = self._linked()
        self._anchors = self._compared(anchors)
        self._place = 0
        self._hash: Any = None
        self._count = 0
        self._sealed = 0
        self._tail = _Span()
        self._inserted = _Span()
        self._entries: dict[str, deque[_Entry]] = {}
        for one in self._chain:
            for entry in one.seal.requests:
                if entry.first_seq >= extent.first_seq:
                    self._entries.setdefault(entry.request_id, deque()).append(_Entry(entry))

    # ---- the seals ---------------------------------------------------------------------------------
    def _readable(self, records: Iterable[StoredRecord]) -> list[SignedSeal]:
        found = []
        for record in records:
            try:
                one = seals.read(record)
            except BadSealError as error:
                kind, level = ("foreign", Level.NOTE) if error.is_foreign else ("bad_seal", Level.CHANGED)
                self._add(kind, level, str(error), record.seq, record.seq)
                continue
            if (one.seal.stream, one.seal.created_ns) != (self._extent.stream, self._extent.created_ns):
                text = f"the seal in record {one.seq} was made for another log, {_name(one.seal)}"
                self._add("wrong_log", Level.CHANGED, text, one.seq, one.seq)
                continue
            found.append(one)
        return found

    def _linked(self) -> list[SignedSeal]:
        """Return the seals whose segments follow one another, and report what does not link."""
        chain: list[SignedSeal] = []
        for one in self._seals:
            if not chain:
                self._check_beginning(one.seal)
            elif one.seal.first_seq <= chain[-1].seal.last_seq:
                text = f"the seal in record {one.seq} contradicts the one in record {chain[-1].seq}"
                self._add("contradicting_seals", Level.CHANGED, text, one.seal.first_seq, one.seal.last_seq)
                continue
            else:
                self._check_link(chain[-1].seal, one.seal)
            chain.append(one)
        self._check_keys(chain)
        if not chain:
            self._add("unsealed", Level.UNPROVEN, "the log has no seals", 1, self._extent.last_seq)
        return chain

    def _check_beginning(self, first: Seal) -> None:
        begins = self._extent.first_seq
        if first.first_seq > begins:
            if first.sealed_since >= first.first_seq:
                text = "older than sealing: not covered by seals"
                self._add("older_than_sealing", Level.NOTE, text, begins, first.first_seq - 1)
            else:
                text = "the seals of these records are missing"
                self._add("missing_seals", Level.CHANGED, text, begins, first.first_seq - 1)
        elif begins > first.sealed_since:
            self._check_expired(first, begins)

    def _check_expired(self, first: Seal, begins: int) -> None:
        """Tell whether the retention explains why records before `begins` are gone."""
        trusted = [one for one in self._seals if one.key in self._trusted]
        max_age_s = min(one.seal.max_age_s for one in trusted or self._seals)
        youngest_ns = first.news_ns if first.news_seq < begins else first.previous_ns
        age_s = (self._extent.now_ns - youngest_ns) / 1e9
        if youngest_ns and age_s < max_age_s - _CLOCKS_S:
            text = (
                f"the records before {begins} were removed: they were {age_s:,.0f} s old, and the log "
                f"keeps records for {max_age_s:,.0f} s"
            )
            self._add("removed", Level.CHANGED, text, first.sealed_since, begins - 1)
            return
        self._add(
            "expired", Level.NOTE, "older than the log's retention: gone", first.sealed_since, begins - 1
        )
        if first.last_seq >= begins:
            text = "sealed together with expired records: only those of workers and epochs can be verified"
            self._add("partly_expired", Level.NOTE, text, begins, first.last_seq)

    def _check_link(self, before: Seal, after: Seal) -> None:
        first, last = before.last_seq + 1, after.first_seq - 1
        if after.previous != before.chain:
            text = "seals are missing, or the history before was replaced: the chain is interrupted"
            self._add("missing_seals", Level.CHANGED, text, first, max(last, first))
        elif first <= last:
            self._add("gap", Level.NOTE, "these records expired before they were sealed", first, last)

    def _check_keys(self, chain: Sequence[SignedSeal]) -> None:
        for key in dict.fromkeys(one.key for one in chain):
            if key in self._trusted:
                continue
            by = [one.seal for one in chain if one.key == key]
            text = f"sealed by key {fingerprint(key)}, which is not trusted here ({len(by)} seals)"
            self._add("unknown_key", Level.UNPROVEN, text, by[0].first_seq, by[-1].last_seq)

    # ---- anchors -----------------------------------------------------------------------------------
    def _compared(self, anchors: Sequence[Anchor]) -> int:
        extent = self._extent
        own = [one for one in anchors if (one.stream, one.created_ns) == (extent.stream, extent.created_ns)]
        by_last = {one.seal.last_seq: one.seal for one in self._seals}
        last = max(by_last, default=0)
        for anchor in own:
            seal = by_last.get(anchor.last_seq)
            if seal is not None and seal.chain.hex() == anchor.chain:
                continue
            if seal is None and anchor.last_seq < extent.first_seq:
                continue  # expired with its records
            kind, text = (
                "other_history",
                f"the history up to record {anchor.last_seq} is not the anchored one",
            )
            if seal is None and anchor.last_seq > last:
                kind = "truncated"
                text = f"an anchor names a seal of the records up to {anchor.last_seq}, which is missing"
            self._add(kind, Level.CHANGED, text, extent.first_seq, anchor.last_seq)
            break  # later anchors differ for the same reason
        return len(own)

    # ---- the records -------------------------------------------------------------------------------
    def take(self, record: StoredRecord) -> None:
        """Fold the next record."""
        while self._place < len(self._chain) and self._chain[self._place].seal.last_seq < record.seq:
            self._close_segment()
        if self._place == len(self._chain):
            if record.subject != self._subjects.sealed:
                self._tail.add(record.seq)
            return
        seal = self._chain[self._place].seal
        if record.seq < seal.first_seq:
            if self._place:
                self._inserted.add(record.seq)
            return
        leaf = hashes.leaf(record)
        if self._hash is None:
            self._hash = hashes.chain_after(seal.previous)
        self._hash.update(leaf)
        self._count += 1
        if seal.first_seq < self._extent.first_seq:
            self._check_member(record, seal)
        self._extend_request(record, leaf)

    def _check_member(self, record: StoredRecord, seal: Seal) -> None:
        """Compare a membership record of a segment whose beginning has expired."""
        address = self._subjects.parse(record.subject)
        if address is None or not address.is_membership:
            return
        if seal.members.get(record.seq) != hashes.leaf(hashes.without_endpoints(record)):
            text = "not as it was sealed"
            self._add("changed_member", Level.CHANGED, text, record.seq, record.seq)

    def _extend_request(self, record: StoredRecord, leaf: bytes) -> None:
        address = self._subjects.parse(record.subject)
        entries = self._entries.get(address.request_id or "") if address is not None else None
        if not entries or record.seq < entries[0].sealed.first_seq:
            return
        while entries and entries[0].sealed.last_seq < record.seq:
            self._close_request(entries.popleft())
        if entries and record.seq >= entries[0].sealed.first_seq:
            entries[0].count += 1
            entries[0].digest.update(leaf)

    def _close_segment(self) -> None:
        seal = self._chain[self._place].seal
        self._place += 1
        found = (self._hash or hashes.chain_after(seal.previous)).digest()
        if seal.first_seq < self._extent.first_seq:
            pass  # its first records have expired
        elif found == seal.chain and self._count == seal.count:
            self._sealed += self._count
        else:
            text = "not as they were sealed"
            if self._count != seal.count:
                text += f": {seal.count} records were sealed, {self._count} are here"
            self._add("changed_segment", Level.CHANGED, text, seal.first_seq, seal.last_seq)
        self._hash, self._count = None, 0

    def _close_request(self, entry: _Entry) -> None:
        sealed = entry.sealed
        if (entry.count, entry.digest.digest()) != (sealed.count, sealed.digest):
            text = f"request {sealed.request_id} is not as it was sealed"
            self._add(
                "changed_request", Level.CHANGED, text, sealed.first_seq, sealed.last_seq, sealed.request_id
            )

    # ---- the end -----------------------------------------------------------------------------------
    def report(self) -> LogReport:
        """Close the fold: there are no more records."""
        while self._place < len(self._chain):
            self._close_segment()
        for entries in self._entries.values():
            for entry in entries:
                self._close_request(entry)
        self._entries.clear()
        for kind, level, text, found in (
            ("inserted", Level.CHANGED, "records where the seals say that there were none", self._inserted),
            ("unsealed_tail", Level.NOTE, "not sealed yet: written after the last seal", self._tail),
        ):
            if found.count and self._chain:
                self._add(kind, level, f"{found.count} records: {text}", found.first, found.last)
        return LogReport(
            findings=self._findings,
            seals=len(self._seals),
            sealed=self._sealed,
            last_sealed_ns=self._chain[-1].seal.last_ns if self._chain else 0,
            keys=list(dict.fromkeys(one.key for one in self._seals)),
            anchors=self._anchors,
        )

    def _add(
        self, kind: str, level: Level, text: str, first: int, last: int, request_id: str | None = None
    ) -> None:
        self._findings.append(
            Finding(kind=kind, level=level, text=text, first_seq=first, last_seq=last, request_id=request_id)
        )


def _name(seal: Seal) -> str:
    return f"{seal.stream} created at {seal.created_ns}"
