"""The fold of a log's records into one summary per request.

The fold may stop at a position and go on later (`dalsegno.history.request_index`). What it needs then is the
epoch in force and, of each request, its `Tracked`.

Some records are judged by earlier ones: an event of a deposed conductor by the epoch that was opened before,
another submission of an id by the first. Once the earlier record has expired, a reader of the whole log would
judge otherwise. So the fold notes such pairs (`Doubt`).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dalsegno.history.summary import Summary
from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    EpochOpened,
    MalformedEventError,
    OutputChunk,
    OutputFence,
    RequestAdmitted,
    RequestResumed,
    RequestSubmitted,
    decode,
)
from shared.ids import is_addressable
from shared.log.port import Log, StoredRecord
from shared.request_output import RequestOutput
from shared.subject_rules import check_event_subject
from shared.subjects import Address, Subjects


class Doubt(NamedTuple):
    """The record at `seq` was judged by the one at `needs_seq`."""

    needs_seq: int
    seq: int


@dataclass(slots=True)
class Tracked:
    """A request while its events are folded.

    Attributes:
        waiting: the records, as subject and data, that decide which chunk will be the first of the answer:
            placements, fences, and chunks that came too early. Empty once there is one, and at the end.
    """

    summary: Summary
    waiting: list[tuple[str, bytes]] = field(default_factory=list)
    _output: RequestOutput | None = None

    def take(self, record: StoredRecord, address: Address, event: AnyEvent) -> None:
        """Fold one valid event of the request."""
        if self.summary.first_ns is None and self.summary.outcome == "open":
            self._await_first_chunk(record, address, event)
        self.summary.take(event, record.time_ns)
        if self.summary.outcome != "open":
            self.waiting, self._output = [], None

    def _await_first_chunk(self, record: StoredRecord, address: Address, event: AnyEvent) -> None:
        match event:
            case OutputChunk():
                if event.advisory:
                    return
            case RequestAdmitted() | RequestResumed() | OutputFence():
                pass
            case _:
                return
        output = self._output = self._output or _output_of(self.waiting)
        if isinstance(event, OutputChunk) and not output.may_write(str(address.writer), event.incarnation):
            return
        if any(not chunk.is_echo for chunk in output.fold(address, event)):
            self.summary.first_ns = record.time_ns
            self.waiting, self._output = [], None
        else:
            self.waiting.append((record.subject, record.data))


def _output_of(waiting: list[tuple[str, bytes]]) -> RequestOutput:
    """Fold the kept records of a request."""
    output = RequestOutput()
    for subject, data in waiting:
        kept = Subjects(subject.partition(".")[0]).parse(subject)
        assert kept is not None, "it was parsed before it was kept"
        output.fold(kept, decode(data, kept.kind))
    return output


def _no_more(request_id: str) -> Tracked | None:
    return None


@dataclass(slots=True)
class SummaryFold:
    """The fold of a log, from any position on.

    Attributes:
        load: returns a request that was folded before and is not among `requests`.
        fence: the epoch in force.
        epoch_seq: the position at which it was opened; 0 if none is known.
        requests: those that were loaded or submitted here, in order.
        doubts: records that were judged by earlier ones.
    """

    subjects: Subjects
    load: Callable[[str], Tracked | None] = _no_more
    fence: EpochFence = field(default_factory=EpochFence)
    epoch_seq: int = 0
    requests: dict[str, Tracked] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)

    def take(self, record: StoredRecord) -> None:
        """Fold one record."""
        address = self.subjects.parse(record.subject)
        if address is None:
            return
        event = _event(record, address)
        if event is not None and not self._admits(event, record.seq):
            return
        if address.request_id is None:
            return
        request_id = str(address.request_id)
        tracked = self._known(request_id)
        if address.kind == "request":
            tracked = self._submit(tracked, record, request_id, event)
        if tracked is None:
            return
        tracked.summary.events += 1
        tracked.summary.last_seq = record.seq
        if event is not None:
            tracked.take(record, address, event)

    def _admits(self, event: AnyEvent, seq: int) -> bool:
        is_valid = self.fence.admits(event)
        if not is_valid:
            self.doubts.append(Doubt(self.epoch_seq, seq))
        elif isinstance(event, EpochOpened):
            self.epoch_seq = seq
        return is_valid

    def _known(self, request_id: str) -> Tracked | None:
        tracked = self.requests.get(request_id)
        if tracked is None and (tracked := self.load(request_id)) is not None:
            self.requests[request_id] = tracked
        return tracked

    def _submit(
        self, known: Tracked | None, record: StoredRecord, request_id: str, event: AnyEvent | None
    ) -> Tracked | None:
        """Return the request that owns the id from now on."""
        submitted = event if isinstance(event, RequestSubmitted) else None
        # The first readable submission owns the id; an unreadable one is rejected and owns none.
        is_new = known is None or (known.summary.model is None and submitted is not None)
        if not is_addressable(request_id):
            return known
        if not is_new:
            assert known is not None
            self.doubts.append(Doubt(known.summary.seq, record.seq))
            return known
        self.requests.pop(request_id, None)
        self.requests[request_id] = found = Tracked(
            Summary(
                request_id=request_id,
                model=submitted.model if submitted is not None else None,
                tenant=submitted.tenant if submitted is not None else None,
                seq=record.seq,
                start_ns=record.time_ns,
            )
        )
        return found


async def summaries(log: Log, subjects: Subjects) -> list[Summary]:
    """Read the whole log; return a summary of every request, in order of submission."""
    fold = SummaryFold(subjects)
    async for record in log.history(subjects.logged()):
        fold.take(record)
    return [tracked.summary for tracked in fold.requests.values()]


def _event(record: StoredRecord, address: Address) -> AnyEvent | None:
    """Decode a record; None if the conductor cannot read it either."""
    with contextlib.suppress(MalformedEventError):
        event = decode(record.data, address.kind)
        check_event_subject(address, event)
        return event
    return None
