"""A small sealed log for tests: records, and the seals that a conductor would store after them."""

from collections.abc import Iterable

import msgspec

from shared.events import encode
from shared.log.port import StoredRecord
from shared.sealing import seals
from shared.sealing.keys import SigningKey
from shared.sealing.log_check import LogExtent
from shared.sealing.request_check import LogName
from shared.sealing.seals import Seal
from shared.sealing.segment import LogIdentity, Segment
from shared.subjects import Subjects

SUBJECTS = Subjects()
KEY = SigningKey("11" * 32)
OTHER_KEY = SigningKey("22" * 32)
CREATED_NS = 1_000_000_000
IDENTITY = LogIdentity(stream=SUBJECTS.stream, created_ns=CREATED_NS, max_age_s=3600.0)
NAME = LogName(stream=SUBJECTS.stream, created_ns=CREATED_NS)
START_NS = 1_700_000_000_000_000_000


class SealedLog:
    """A log with a sealer. `open` are the requests that have not ended."""

    def __init__(self, key: SigningKey = KEY, *, first_seq: int = 1) -> None:
        self.records: list[StoredRecord] = []
        self.open: set[str] = set()
        self.key = key
        self.next_seq = 1
        self.time_ns = START_NS
        self.segment = Segment(IDENTITY, SUBJECTS, first_seq, first_seq)

    @property
    def seals(self) -> list[StoredRecord]:
        return [record for record in self.records if record.subject == SUBJECTS.sealed]

    def store(self, subject: str, data: bytes = b"data") -> StoredRecord:
        seq = self.next_seq
        self.next_seq += 1
        record = StoredRecord(seq, subject, data, self.time_ns)
        self.time_ns += 1_000_000_000
        self.records.append(record)
        if seq >= self.segment.first_seq:
            self.segment.add(record)
        return record

    def request(self, request_id: str, *, ends: bool = True) -> None:
        """Store the records of a request."""
        self.store(SUBJECTS.request(request_id), b"question")
        self.open.add(request_id)
        self.store(SUBJECTS.output("nats", request_id, "w0"), b"answer")
        if ends:
            self.store(SUBJECTS.walk(request_id), b"finished")
            self.open.discard(request_id)

    def seal(self) -> Seal:
        """Store a seal of all records so far."""
        seal = self.segment.draft(self.open, self.next_seq - 1)
        self.segment.stored(seal)
        self.store(SUBJECTS.sealed, encode(seals.signed(seal, self.key, epoch=1)))
        return seal

    def expire(self, count: int) -> None:
        """Leave a gap of records that nobody sealed."""
        self.next_seq += count
        self.segment.skip_expired(self.next_seq)

    def quiet(self, seconds: int) -> None:
        """Let time pass without a record."""
        self.time_ns += seconds * 1_000_000_000

    def extent(self, *, first_seq: int = 1, now_s: float = 60.0) -> LogExtent:
        last = self.records[-1].seq if self.records else 0
        return LogExtent(
            stream=SUBJECTS.stream,
            created_ns=CREATED_NS,
            first_seq=first_seq,
            last_seq=last,
            now_ns=self.time_ns + int(now_s * 1e9),
        )


def two_requests() -> SealedLog:
    """A log of a worker and two requests, with a seal after each of them."""
    log = SealedLog()
    log.store(SUBJECTS.epoch, b"epoch")
    log.store(SUBJECTS.worker(0), b"joined")
    for request_id in ("first", "second"):
        log.request(request_id)
        log.seal()
    return log


def with_data(records: Iterable[StoredRecord], seq: int, data: bytes) -> list[StoredRecord]:
    """The records, with other bytes in one of them."""
    return [msgspec.structs.replace(one, data=data) if one.seq == seq else one for one in records]


def without(records: Iterable[StoredRecord], *seqs: int) -> list[StoredRecord]:
    return [one for one in records if one.seq not in seqs]
