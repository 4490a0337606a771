"""Seals of single requests: which cover a request's records in a log, and their verification in words."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

from configs import seal_keys
from dalsegno.config import resolve
from shared.log.port import Log, LogState, StoredRecord
from shared.sealing import seals
from shared.sealing.findings import Level
from shared.sealing.request_check import LogName, RequestReport
from shared.sealing.seals import BadSealError, SignedSeal
from shared.subjects import Subjects


def trusted_keys() -> frozenset[bytes]:
    """Return the public keys that are trusted here: the configured ones, and that of the key on this machine.

    Raises:
        ConfigError: a configured key cannot be read.
    """
    return seal_keys.trusted_keys(resolve.sealing())


async def covering(
    log: Log, subjects: Subjects, records: Sequence[StoredRecord], requests: Iterable[str]
) -> list[StoredRecord]:
    """Return the seals that cover the records of requests, in log order."""
    found: dict[int, StoredRecord] = {}
    wanted = _Wanted(subjects, records, requests)
    while (start_seq := wanted.next_seq) is not None:
        async with aclosing(log.history([subjects.sealed], start_seq + 1)) as history:
            async for record in history:
                with suppress(BadSealError):
                    if wanted.take(seals.read(record)):
                        found[record.seq] = record
                    if start_seq not in wanted:
                        break
            else:
                wanted.give_up(start_seq)
    return [found[seq] for seq in sorted(found)]


def name_of(log: LogState, subjects: Subjects) -> LogName:
    """Return the name of a log, as seals have it."""
    return LogName(stream=subjects.stream, created_ns=log.created_ns, first_seq=log.first_seq)


class _Wanted:
    """The records that no seal was found for yet, by position; None for those of workers and epochs."""

    def __init__(self, subjects: Subjects, records: Sequence[StoredRecord], requests: Iterable[str]) -> None:
        self._left: dict[int, str | None] = {}
        own = set(requests)
        for record in records:
            address = subjects.parse(record.subject)
            if address is not None and (address.is_membership or address.request_id in own):
                self._left[record.seq] = address.request_id

    def __contains__(self, seq: int) -> bool:
        return seq in self._left

    @property
    def next_seq(self) -> int | None:
        return next(iter(self._left), None)

    def give_up(self, seq: int) -> None:
        """Note that no seal covers a record: none covers the later records of its kind either."""
        request_id = self._left[seq]
        self._left = {at: whose for at, whose in self._left.items() if whose != request_id}

    def take(self, found: SignedSeal) -> bool:
        """Note a seal; return whether it covers one of the records."""
        before = len(self._left)
        for seq in found.seal.members:
            self._left.pop(seq, None)
        first_seq = found.seal.first_seq
        for seq in [seq for seq, whose in self._left.items() if whose is None and seq < first_seq]:
            del self._left[seq]  # older than sealing, or its seal is missing
        entries = {entry.request_id: entry for entry in found.seal.requests}
        for seq, whose in list(self._left.items()):
            entry = entries.get(whose or "")
            if entry is not None and entry.first_seq <= seq <= entry.last_seq:
                del self._left[seq]
        return len(self._left) < before


def lines(report: RequestReport) -> list[str]:
    """Return what is to be said about the seals of a request; nothing if all of its records are as sealed."""
    if report.level is Level.CHANGED:
        return [f"TAMPERED: {finding.text}" for finding in report.findings if finding.level is Level.CHANGED]
    if report.level is Level.UNPROVEN:
        reasons = dict.fromkeys(one.text for one in report.findings if one.level is Level.UNPROVEN)
        return [f"not proven by seals: {'; '.join(reasons)}"]
    return []


def as_plain(report: RequestReport) -> Mapping[str, object]:
    """Return a report as JSON values."""
    return {
        "result": "intact" if report.is_sealed else str(report.level),
        "records": report.records,
        "keys": [key.hex() for key in report.keys],
        "findings": [
            {
                "kind": one.kind,
                "level": str(one.level),
                "text": one.text,
                "records": [one.first_seq, one.last_seq],
            }
            for one in report.findings
        ],
    }
