"""What the log says of one request's way through the system, sorted for its explanation. Pure.

Void events are left out as everywhere: those of deposed conductors, and reports of workers that had no order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from dalsegno.bundle.manifest import event_of
from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    DeadlinePassed,
    EpochOpened,
    NodeReady,
    NodeWork,
    OutputChunk,
    OutputFence,
    ProcessEnd,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    WalkCompleted,
    WalkFailed,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.log.port import StoredRecord
from shared.subjects import Subjects

Report: TypeAlias = WalkCompleted | WalkFailed | WalkStopped
End: TypeAlias = RequestFinished | RequestFailed | RequestCancelled | RequestRejected


@dataclass(frozen=True, slots=True)
class Stored:
    """An event with its position and its time in the log, Unix nanoseconds."""

    seq: int
    time_ns: int
    event: AnyEvent


@dataclass(slots=True)
class Order:
    """One rank's part of an attempt of a step."""

    ready: NodeReady
    seq: int
    ordered_ns: int
    report: Report | None = None
    report_seq: int = 0
    reported_ns: int | None = None

    @property
    def work(self) -> Mapping[str, NodeWork]:
        """The work of the rank's nodes; empty while it has not reported, and in older logs."""
        return self.report.work if self.report is not None else {}


@dataclass(slots=True)
class Step:
    """An attempt of a step, on all its ranks."""

    attempt: int
    index: int
    orders: dict[int, Order] = field(default_factory=dict)

    @property
    def first(self) -> Order:
        """The order that was stored first."""
        return min(self.orders.values(), key=lambda order: order.seq)

    @property
    def last_seq(self) -> int:
        """The position of its last report; 0 while a rank has not reported."""
        seqs = [order.report_seq for order in self.orders.values()]
        return max(seqs) if all(seqs) else 0

    @property
    def walks(self) -> str:
        """The names of its walks."""
        return "+".join(walk.name for walk in self.first.ready.walks)


@dataclass(slots=True)
class Incarnation:
    """One incarnation of a rank."""

    rank: int
    seq: int
    joined_ns: int
    pid: int
    ended: tuple[ProcessEnd, ...] = ()
    lost: Stored | None = None
    left: Stored | None = None


@dataclass(slots=True)
class RequestFacts:
    """The facts of a request.

    Attributes:
        submitted_seq, submitted_ns: of the submission that owns the id, or of the first if none can be read.
        steps: by attempt and index.
        marks: admission, resumptions, fences and deadlines, in log order.
        chunks: the chunks of its answer; advisory ones are left out.
        incarnations: by the position of their `worker.joined`.
        epochs: the conductors' epochs.
        end: how it ended; None while it is open.
        last_ns: the time of the last record that was read.
    """

    request_id: str
    submitted_seq: int = 0
    submitted_ns: int = 0
    submission: RequestSubmitted | None = None
    admitted: Stored | None = None
    end: Stored | None = None
    cancel: Stored | None = None
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    marks: list[Stored] = field(default_factory=list)
    chunks: list[Stored] = field(default_factory=list)
    incarnations: dict[int, Incarnation] = field(default_factory=dict)
    epochs: list[Stored] = field(default_factory=list)
    last_ns: int = 0

    @classmethod
    def of(cls, records: Iterable[StoredRecord], subjects: Subjects, request_id: str) -> Self:
        """Fold the records of a request, and those of workers and epochs, in log order."""
        facts, fence, at_ns = cls(request_id), EpochFence(), 0
        for record in records:
            event = event_of(record, subjects)
            address = subjects.parse(record.subject)
            if event is None and address is not None and address.kind == "request":
                facts.submit(record, None)
            if address is None or event is None or not fence.admits(event):
                continue
            at_ns = max(at_ns, record.time_ns)  # the server's clock may be set back
            if address.is_membership or address.request_id == request_id:
                facts.last_ns = at_ns
                facts.fold(Stored(record.seq, at_ns, event))
        return facts

    @property
    def until_ns(self) -> int:
        """The time of its end, or of the last record while it is open."""
        return self.end.time_ns if self.end is not None else self.last_ns

    @property
    def attempts(self) -> int:
        """The number of its attempts."""
        return max((attempt for attempt, _ in self.steps), default=1)

    def fold(self, stored: Stored) -> None:
        """Fold one valid event."""
        match stored.event:
            case RequestSubmitted() as submission:
                self.submit(stored, submission)
            case RequestAdmitted():
                self.admitted = self.admitted or stored
                self.marks.append(stored)
            case RequestResumed() | OutputFence() | DeadlinePassed():
                self.marks.append(stored)
            case NodeReady() as ready:
                self._order(stored, ready)
            case WalkCompleted() | WalkFailed() | WalkStopped():
                self._report(stored)
            case OutputChunk() as chunk if not chunk.advisory:
                self.chunks.append(stored)
            case RequestCancel():
                self.cancel = self.cancel or stored
            case RequestRejected() as rejected:
                if rejected.submission_seq == self.submitted_seq:
                    self.end = self.end or stored
            case RequestFinished() | RequestFailed() | RequestCancelled():
                self.end = self.end or stored
            case EpochOpened():
                self.epochs.append(stored)
            case WorkerJoined() | WorkerLost() | WorkerLeaving():
                self._membership(stored)
            case _:
                pass

    def submit(self, record: Stored | StoredRecord, submission: RequestSubmitted | None) -> None:
        """Fold a submission of the id; None is one that cannot be read. The first readable one owns it."""
        if not self.submitted_seq or (self.submission is None and submission is not None):
            self.submitted_seq, self.submitted_ns = record.seq, record.time_ns
            self.submission = submission

    def _order(self, stored: Stored, ready: NodeReady) -> None:
        key = ready.attempt, ready.index
        step = self.steps.setdefault(key, Step(*key))
        step.orders.setdefault(ready.rank, Order(ready, stored.seq, stored.time_ns))

    def _report(self, stored: Stored) -> None:
        event = stored.event
        assert isinstance(event, WalkCompleted | WalkFailed | WalkStopped)
        step = self.steps.get((event.attempt, event.index))
        order = step.orders.get(event.rank) if step is not None else None
        if order is None or order.ready.incarnation != event.incarnation:
            return  # void: it had no such order
        if order.report is None or isinstance(order.report, WalkStopped):
            order.report, order.report_seq, order.reported_ns = event, stored.seq, stored.time_ns

    def _membership(self, stored: Stored) -> None:
        event = stored.event
        if isinstance(event, WorkerJoined):
            seq = event.incarnation or stored.seq  # a repeated join names the incarnation
            known = {one.seq for one in self.incarnations.values()}
            if seq not in known:
                self.incarnations[seq] = Incarnation(
                    event.rank, seq, stored.time_ns, event.pid, tuple(event.ended)
                )
            return
        assert isinstance(event, WorkerLost | WorkerLeaving)
        found = self.incarnations.get(event.incarnation or 0)
        if found is None or found.rank != event.rank:
            return
        if isinstance(event, WorkerLost):
            found.lost = found.lost or stored
        else:
            found.left = found.left or stored

    def successor(self, of: Incarnation) -> Incarnation | None:
        """The next incarnation of a rank."""
        later = (one for one in self.incarnations.values() if one.rank == of.rank and one.seq > of.seq)
        return min(later, key=lambda one: one.seq, default=None)

    def process_end(self, of: Incarnation) -> ProcessEnd | None:
        """Return the end of an incarnation's process; None if it runs, or no launcher recorded its end."""
        later = self.successor(of)
        if later is None or later.pid == of.pid:
            return None
        found = [end for end in later.ended if end.pid == of.pid]
        return found[-1] if found else None
