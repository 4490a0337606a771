"""The segment: all records since the last seal, folded one by one into the next statement. Pure.

Events are not decoded (except the few of workers that join): a record is its position, time, subject and
bytes. The caller knows which requests are still open.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec

from shared.ids import is_token
from shared.log.port import StoredRecord
from shared.sealing import hashes
from shared.sealing.seals import Seal, SealedRequest
from shared.subjects import Subjects

MAX_RECORDS: Final = 5_000
"""Records of one segment: a long backlog is sealed in several steps."""
_NEVER_DECISIVE: Final = frozenset({"output", "edge", "conductor", "worker"})
"""Kinds of records that begin and end no request."""
MAX_REQUESTS: Final = 1_000
MAX_MEMBERS: Final = 500
"""Entries of one statement, so that it is far smaller than the log's largest event."""


class LogIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The log that is sealed, as statements name it."""

    stream: str
    created_ns: int
    max_age_s: float


@dataclass(slots=True)
class _Run:
    """The records of one request that no seal lists yet; `decisive_seq` is the last to begin or end it."""

    first_seq: int
    decisive_seq: int = 0
    last_seq: int = 0
    count: int = 0
    digest: Any = field(default_factory=hashes.of_request)


@dataclass(slots=True)
class Segment:
    """The fold. `add` every record in order, `draft` a statement, and `stored` begins the next segment.

    Attributes:
        first_seq: the first position of the segment.
        previous: the chain value before it.
    """

    log: LogIdentity
    subjects: Subjects
    first_seq: int
    sealed_since: int
    previous: bytes = hashes.BEGINNING
    previous_ns: int = 0
    last_member: int = 0
    last_seq: int = 0
    count: int = 0
    _news_seq: int = 0
    _news_ns: int = 0
    _decisive_seq: int = 0
    _last_ns: int = 0
    _begun: int = 0
    _runs: dict[str, _Run] = field(default_factory=dict)
    _members: dict[int, bytes] = field(default_factory=dict)
    _chain: Any = None

    def __post_init__(self) -> None:
        self._chain = hashes.chain_after(self.previous)
        self.last_seq = self.first_seq - 1

    @classmethod
    def after(cls, seal: Seal, log: LogIdentity, subjects: Subjects) -> "Segment":
        """Return the empty segment that follows a seal."""
        return cls(
            log,
            subjects,
            seal.last_seq + 1,
            seal.sealed_since,
            previous=seal.chain,
            previous_ns=seal.last_ns,
            last_member=max(seal.members, default=seal.last_member),
        )

    @property
    def is_full(self) -> bool:
        """True if it has to be sealed before more records are added."""
        return self.count >= MAX_RECORDS or len(self._members) >= MAX_MEMBERS or self._begun >= MAX_REQUESTS

    @property
    def has_news(self) -> bool:
        """True if it contains a record that is not a seal."""
        return self._news_seq > 0

    def skip_expired(self, first_seq: int) -> None:
        """Begin the empty segment at `first_seq`: the log has deleted what was before."""
        if not self.count and first_seq > self.first_seq:
            self.first_seq, self.last_seq = first_seq, first_seq - 1

    def recall(self, record: StoredRecord) -> None:
        """Fold a record of an earlier segment, of a request that no seal lists yet."""
        address = self.subjects.parse(record.subject)
        if address is not None and address.request_id is not None:
            self._extend(address.request_id, record.seq, hashes.leaf(record), is_decisive=True)

    def add(self, record: StoredRecord) -> None:
        """Fold the next record of the log."""
        leaf = hashes.leaf(record)
        self._chain.update(leaf)
        self.count += 1
        self.last_seq, self._last_ns = record.seq, record.time_ns
        if not self._news_seq and record.subject != self.subjects.sealed:
            self._news_seq, self._news_ns = record.seq, record.time_ns
        address = self.subjects.parse(record.subject)
        if address is None:
            return
        is_decisive = address.kind not in _NEVER_DECISIVE
        if is_decisive:
            self._decisive_seq = record.seq
        if address.request_id is not None:
            self._extend(address.request_id, record.seq, leaf, is_decisive=is_decisive)
        elif address.is_membership:
            shown = hashes.without_endpoints(record)
            self._members[record.seq] = leaf if shown is record else hashes.leaf(shown)

    def draft(
        self, open_requests: Collection[str], known_seq: int, *, max_requests: int = MAX_REQUESTS
    ) -> Seal:
        """Return the statement about the records so far.

        Args:
            open_requests: the requests that had not ended at `known_seq`.
            known_seq: the position of the last record that `open_requests` takes into account. Requests that
                may have begun or ended later count as open.
            max_requests: the most requests to list; further ones are left to the next seal.
        """
        if known_seq >= self._decisive_seq:  # records since then begin and end no request
            known_seq = max(known_seq, self.last_seq)
        over = (
            request_id
            for request_id, run in self._runs.items()
            if max(run.first_seq, run.decisive_seq) <= known_seq and request_id not in open_requests
        )
        listed = {request_id: self._runs[request_id] for request_id in islice(over, max_requests)}
        left = (run.first_seq for request_id, run in self._runs.items() if request_id not in listed)
        return Seal(
            stream=self.log.stream,
            created_ns=self.log.created_ns,
            max_age_s=self.log.max_age_s,
            sealed_since=self.sealed_since,
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            count=self.count,
            previous=self.previous,
            chain=self._chain.digest(),
            previous_ns=self.previous_ns,
            news_seq=self._news_seq,
            news_ns=self._news_ns,
            last_ns=self._last_ns,
            last_member=self.last_member,
            open_since=min(left, default=self.last_seq + 1),
            requests=[_entry(request_id, run) for request_id, run in listed.items()],
            members=dict(self._members),
        )

    def stored(self, seal: Seal) -> None:
        """Begin the next segment: `seal`, the last draft, is in the log."""
        for entry in seal.requests:
            del self._runs[entry.request_id]
        self.first_seq, self.previous, self.previous_ns = seal.last_seq + 1, seal.chain, seal.last_ns
        self.last_member = max(seal.members, default=seal.last_member)
        self.count, self._news_seq, self._members, self._begun = 0, 0, {}, 0
        self._chain = hashes.chain_after(seal.chain)

    def _extend(self, request_id: str, seq: int, leaf: bytes, *, is_decisive: bool) -> None:
        if not is_token(request_id):
            return  # never a request: its records are covered by the chain alone
        run = self._runs.get(request_id)
        if run is None:
            run = self._runs[request_id] = _Run(seq)
            self._begun += seq >= self.first_seq  # not of those that a successor reads again
        run.last_seq = seq
        if is_decisive:
            run.decisive_seq = seq
        run.count += 1
        run.digest.update(leaf)


def _entry(request_id: str, run: _Run) -> SealedRequest:
    return SealedRequest(
        request_id=request_id,
        first_seq=run.first_seq,
        last_seq=run.last_seq,
        count=run.count,
        digest=run.digest.digest(),
    )
