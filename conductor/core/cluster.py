"""The cluster: the state of all requests and workers, folded from the log one record at a time.

Sans-IO. `fold` takes a record and returns the decisions that follow from it; `schedule` returns admissions
and resumptions that are possible now; `outstanding` returns decisions that are not in the log yet, which a
successor publishes when it takes over. The caller decides whether to publish: a standby folds the same log
and discards the decisions.

    log ──record──> fold ──> Reactor.fact / Reactor.recorded ──> decisions (expected)
                      └────> world, waiting, ended

Duplicates and late events are normal input. Unreadable records do no harm: one written by a client is
refused, one of our own is noted.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import msgspec

from conductor.core.lifecycle import Phase
from conductor.core.orders import failed
from conductor.core.react import Deadline, Fact, IncarnationEnd, Reaction, Reactor, deadlines
from conductor.core.replicas import Memory, Place
from conductor.core.request import Decision, RankState, Request, World, archived, decided, submitted
from conductor.core.retention import LIVE, Retention, size_of, trim_digests, trim_ended
from conductor.core.schedule import Deployment, place_of, reject_overflow, rejection, schedule
from models.base import ModelGraph
from shared.adapters import Adapter
from shared.epoch_fence import EpochFence
from shared.errors import Divergence
from shared.events import (
    AdapterLoaded,
    AdapterUnloaded,
    AnyEvent,
    BatchEvent,
    ConversationEvent,
    DeadlinePassed,
    EpochOpened,
    Event,
    Failure,
    LogSealed,
    MalformedEventError,
    NodeFired,
    NodeReady,
    OutputChunk,
    OutputFence,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestsRefused,
    RequestSubmitted,
    RequestWatched,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
    is_answer_of_server,
    submission_digest,
)
from shared.ids import is_addressable
from shared.log.port import StoredRecord
from shared.subject_rules import check_event_subject, read_event
from shared.subjects import Address, Subjects


class Entry(msgspec.Struct, frozen=True):
    """A readable record: its subject and its event."""

    record: StoredRecord
    address: Address
    event: AnyEvent


class Folded(msgspec.Struct, frozen=True):
    """The result of folding one record.

    Attributes:
        decisions: to be published, in order.
        void: the record was written by a deposed conductor.
        confirmed: the record is a decision and equals the one made here.
        divergence: the record is a decision and differs from the one made here.
        note: information for an operator; usually None.
        quotation: the part of it that may quote a client.
    """

    decisions: tuple[Decision, ...] = ()
    void: bool = False
    confirmed: bool = False
    divergence: Divergence | None = None
    note: str | None = None
    quotation: str | None = None


@dataclass(slots=True)
class Cluster:
    """All requests and workers.

    Attributes:
        graph_of: the graph of a family, by name.
        seq: position of the last folded record; `now_ns` is the log's time there.
        leader: the conductor that opened the highest epoch.
        open: requests that have not ended, in order of submission. `waiting` are those that `schedule` may
            still admit, `held` those it may resume. `_places` has all other open requests, including those
            whose admission or resumption was sent but is not in the log yet.
        retention: the limits of what is kept of ended requests.
        ended_bytes: the size of `ended`.
        digests: by ended request, the time of its end and the digest of its submission.
        forgotten_ns: time of the last end whose digest was dropped although the log may have the request.
        refusals: refusals of submissions that are not in the log yet.
        blamed: incarnations that were ended by a single request, with that request. They make no other
            request a suspect.
        memory: state of the choice of replicas; a cache.
        adapters: the LoRA adapters that were loaded at run time, by name.
    """

    graph_of: Callable[[str], ModelGraph]
    subjects: Subjects
    seq: int = 0
    now_ns: int = 0
    world: World = field(default_factory=World)
    fence: EpochFence = field(default_factory=EpochFence)
    leader: str = ""
    retention: Retention = LIVE
    open: dict[str, Request] = field(default_factory=dict)
    ended: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    ended_bytes: int = 0
    digests: dict[str, tuple[int, str]] = field(default_factory=dict)
    forgotten_ns: int = 0
    refusals: dict[str, RequestRejected] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)
    held: dict[str, Request] = field(default_factory=dict)
    blamed: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    adapters: dict[str, Adapter] = field(default_factory=dict)
    _places: dict[str, Place] = field(default_factory=dict)
    _unscheduled: dict[str, Request] = field(default_factory=dict)
    _joins: set[str] = field(default_factory=set)
    _reactor: Reactor = field(init=False)

    def __post_init__(self) -> None:
        self._reactor = Reactor(self.graph_of)

    # ---- public operations -------------------------------------------------------------------------
    def fold(self, record: StoredRecord) -> Folded:
        """Fold one record of the log. Records are folded in order."""
        entry = self.read(record)
        return self.apply(entry) if isinstance(entry, Entry) else entry

    def read(self, record: StoredRecord) -> Entry | Folded:
        """The first half of `fold`: decode a record, or return the result if it has no effect."""
        if record.seq <= self.seq:
            return Folded()
        self.seq, self.now_ns = record.seq, max(self.now_ns, record.time_ns)
        address = self.subjects.parse(record.subject)
        if address is None:
            return Folded(
                note=f"record {record.seq} is on {record.subject[:200]}: not a subject of this deployment"
            )
        try:
            event = decode(record.data, address.kind)
            check_event_subject(address, event)
        except MalformedEventError as error:
            return self._malformed(address, record, str(error))
        return Entry(record, address, event)

    def apply(self, entry: Entry) -> Folded:
        """The second half of `fold`."""
        record, event = entry.record, entry.event
        if not self.fence.admits(event):
            return Folded(
                void=True,
                note=f"record {record.seq} is from the closed epoch {event.epoch} and has no effect",
            )
        return self.HANDLERS[type(event)](self, entry.address.request_id or "", event, record)

    def schedule(self, deployment: Deployment) -> list[Decision]:
        """Admit and resume what is possible now. Each decision is returned once; it counts once stored."""
        if not self.waiting and not self.held:
            return []
        new = list(self._unscheduled.values())
        self._unscheduled.clear()
        refused = [
            refusal
            for request in new
            if (refusal := rejection(request, deployment, self.graph_of(deployment.family)))
        ]
        for refusal in refused:
            self.waiting.pop(str(refusal.request_id))
        given = schedule(
            self.waiting.values(),
            self.held.values(),
            self._places.values(),
            self.world,
            deployment,
            blamed=self.blamed,
            memory=self.memory,
        )
        for decision in given:
            request_id = str(decision.request_id)
            chosen = self.waiting if isinstance(decision, RequestAdmitted) else self.held
            self._places[request_id] = place_of(decision, chosen.pop(request_id))
        return [*refused, *given, *self._reject_overflow(new, deployment)]

    def _reject_overflow(self, new: list[Request], deployment: Deployment) -> list[RequestRejected]:
        """Reject the last submissions if more are waiting than allowed."""
        if deployment.max_waiting is None or (too_many := len(self.waiting) - deployment.max_waiting) <= 0:
            return []
        last = [request for request in new if request.id in self.waiting][-too_many:]
        for request in last:
            del self.waiting[request.id]
        return [reject_overflow(request, deployment) for request in last]

    def deadlines(self) -> list[Deadline]:
        """The time limits of all open requests, unordered."""
        return [deadline for request in self.open.values() for deadline in deadlines(request)]

    def outstanding(self) -> list[Decision]:
        """Decisions that are not in the log, in order of submission: a successor publishes them."""
        requests = (*self.ended.values(), *self.open.values())
        return [*self.refusals.values(), *(d for r in requests for d in r.expected.values())]

    def request(self, request_id: str) -> Request | None:
        """A request that is open or ended recently."""
        return self.open.get(request_id) or self.ended.get(request_id)

    def may_have_forgotten(self, record: StoredRecord) -> str | None:
        """Return the request of a submission, if it may be one that ended and was forgotten too early.

        Only the log can tell: the caller looks there for an earlier submission, and gives it to `recall`.
        """
        if self.forgotten_ns <= max(0, self.now_ns - self.retention.digests_ns):
            return None
        address = self.subjects.parse(record.subject)
        if address is None or address.kind != "request" or record.seq <= self.seq:
            return None
        request_id = str(address.request_id)
        if request_id in self.digests or self.request(request_id):
            return None
        # Also if it says that it is the first one: only the server knows that, and not its writer.
        return None if _submission(record, self.subjects) is None else request_id

    def recall(self, request_id: str, earlier: StoredRecord) -> bool:
        """Remember an ended request again, by its earliest readable submission; return whether it is one."""
        event = _submission(earlier, self.subjects)
        if event is not None:
            self.digests[request_id] = (self.now_ns, submission_digest(event))
        return event is not None

    # ---- by kind of event --------------------------------------------------------------------------
    # `HANDLERS`, below, maps event types to these methods.
    def _submitted(self, request_id: str, event: RequestSubmitted, record: StoredRecord) -> Folded:
        known = self.request(request_id)
        digest = known.digest if known else self.digests.get(request_id, (0, None))[1]
        if digest is None:
            request = submitted(request_id, event, record, self.adapters)
            self.open[request_id] = self.waiting[request_id] = self._unscheduled[request_id] = request
            return Folded()
        if digest == submission_digest(event):
            if event.is_first and request_id not in self.open:
                message = f"request {request_id} has ended, and the log keeps its answer no more"
                return self._refuse(
                    request_id, record, Failure(code="request_expired", message=message, status=410)
                )
            return Folded(note=f"request {request_id} was submitted again, unchanged; it runs once")
        message = f"request_id {request_id} is taken by another request; use a new one"
        return self._refuse(
            request_id, record, Failure(code="request_id_conflict", message=message, status=409)
        )

    def _fact(self, request_id: str, event: Fact, record: StoredRecord) -> Folded:
        request = self.open.get(request_id)
        if request is None:
            return Folded()  # too late: the request has ended or was never submitted
        return self._adopt(self._reactor.fact(request, event, record, self.world))

    def _decision(self, request_id: str, event: Decision, record: StoredRecord) -> Folded:
        if isinstance(event, RequestRejected) and self.refusals.pop(event.id, None) is not None:
            return Folded(confirmed=True)
        request = self.request(request_id)
        if request is None:
            return Folded()
        confirmed = event.id in request.expected
        try:
            reaction = self._reactor.recorded(request, event, record, self.world)
        except Divergence as divergence:
            return self._diverged(request, event, divergence)
        folded = self._adopt(reaction)
        return Folded(decisions=folded.decisions, confirmed=confirmed)

    def _joined(self, _: str, event: WorkerJoined, record: StoredRecord) -> Folded:
        if event.id in self._joins:
            return Folded()  # a second copy of a join, perhaps of an incarnation that is over
        self._joins.add(event.id)
        # A repeated copy names its incarnation: the log may no longer have the first one.
        incarnation = event.incarnation or record.seq
        decisions = self._interrupt(event, record)
        state = RankState(
            incarnation=incarnation,
            kv_tokens=event.kv_tokens,
            max_seq_len=event.max_seq_len,
            weights=event.node_weights,
            revision=event.revision,
        )
        self.world = World(ranks=self.world.ranks | {event.rank: state})
        return Folded(decisions, note=f"rank {event.rank} joined as incarnation {incarnation}")

    def _left(self, _: str, event: WorkerLeaving | WorkerLost, record: StoredRecord) -> Folded:
        state = self.world.ranks.get(event.rank)
        if state is None or state.incarnation is None or state.incarnation != event.incarnation:
            return Folded()  # the incarnation has ended already
        decisions = self._interrupt(event, record)
        away = msgspec.structs.replace(state, incarnation=None)
        self.world = World(ranks=self.world.ranks | {event.rank: away})
        how = f"was lost ({event.reason})" if isinstance(event, WorkerLost) else "left"
        return Folded(
            decisions, note=f"rank {event.rank} {how}; its requests are held until they can be resumed"
        )

    def _interrupt(self, event: IncarnationEnd, record: StoredRecord) -> tuple[Decision, ...]:
        """Apply the end of an incarnation to each open request; `world` is the state before it."""
        if self.world.incarnation(event.rank) is None:
            return ()
        self.memory.affinity.forget(event.rank)
        self._blame(event)
        decisions: list[Decision] = []
        for request in list(self.open.values()):
            reaction = self._reactor.fact(request, event, record, self.world)
            decisions += self._adopt(reaction).decisions
        return tuple(decisions)

    def _blame(self, event: IncarnationEnd) -> None:
        """Blame a request that was alone with a worker that died, for all deaths it is suspected of."""
        suspected = {
            incarnation
            for one in self.open.values()
            for incarnation in one.suspicion.dead_incarnations.values()
        }
        self.blamed = {incarnation: by for incarnation, by in self.blamed.items() if incarnation in suspected}
        incarnation = self.world.incarnation(event.rank)
        if isinstance(event, WorkerLeaving) or incarnation is None:
            return
        for request in self.open.values():
            if event.rank in request.suspicion.alone_on:
                for one in (incarnation, *request.suspicion.dead_incarnations.values()):
                    self.blamed.setdefault(one, request.id)

    def _opened(self, _: str, event: EpochOpened, record: StoredRecord) -> Folded:
        self.leader = event.conductor
        # Admissions that the deposed conductor was about to make are void: the requests wait again.
        self.waiting = {r.id: r for r in self.open.values() if r.phase is Phase.WAITING}
        self.held = {r.id: r for r in self.open.values() if r.phase is Phase.HELD}
        self._places = {r.id: _place(r) for r in self.open.values() if r.phase is Phase.RUNNING}
        self._unscheduled = dict(self.waiting)
        return Folded()

    def _adapter_loaded(self, _: str, event: AdapterLoaded, record: StoredRecord) -> Folded:
        self.adapters = self.adapters | {event.adapter.name: event.adapter}
        return Folded(note=f"adapter {event.adapter.name} is {event.adapter.digest[:12]} from here")

    def _adapter_unloaded(self, _: str, event: AdapterUnloaded, record: StoredRecord) -> Folded:
        self.adapters = {name: one for name, one in self.adapters.items() if name != event.name}
        return Folded(note=f"adapter {event.name} is unloaded")

    def _nothing(self, _: str, event: Event, record: StoredRecord) -> Folded:
        return Folded()

    # A table, not a `match`, which tests case after case: the last of twenty took 3 us.
    # A test checks that no type is missing.
    HANDLERS: ClassVar[dict[type[Event], Callable[["Cluster", str, Any, StoredRecord], Folded]]] = {
        EpochOpened: _opened,
        RequestSubmitted: _submitted,
        RequestAdmitted: _decision,
        RequestRejected: _decision,
        RequestResumed: _decision,
        DeadlinePassed: _fact,
        WalkBegun: _fact,
        WalkProgressed: _fact,
        NodeReady: _decision,
        WalkStop: _decision,
        OutputFence: _decision,
        RequestFinished: _decision,
        RequestFailed: _decision,
        RequestCancelled: _decision,
        RequestCancel: _fact,
        RequestWatched: _nothing,
        WalkCompleted: _fact,
        WalkFailed: _fact,
        WalkStopped: _nothing,
        OutputChunk: _nothing,
        NodeFired: _nothing,
        StreamSent: _nothing,
        StreamTaken: _nothing,
        TensorsReleased: _nothing,
        WorkerJoined: _joined,
        WorkerLeaving: _left,
        WorkerLost: _left,
        LogSealed: _nothing,
        AdapterLoaded: _adapter_loaded,
        AdapterUnloaded: _adapter_unloaded,
        RequestsRefused: _nothing,
        **dict.fromkeys((*get_args(BatchEvent), *get_args(ConversationEvent)), _nothing),
    }

    # ---- bookkeeping -------------------------------------------------------------------------------
    def _adopt(self, reaction: Reaction) -> Folded:
        """Store the next state of a request in the maps of its phase."""
        request = reaction.request
        if request.phase is not Phase.WAITING:
            self.waiting.pop(request.id, None)
            self._unscheduled.pop(request.id, None)
        before = self.open.get(request.id)
        if request.phase.ended:
            self._end(request)
            return Folded(reaction.decisions)
        self.open[request.id] = request
        if request.phase is Phase.RUNNING:
            self.held.pop(request.id, None)
            self._places[request.id] = _place(request)
        elif request.phase is Phase.HELD and (request.id in self.held or _is_newly_held(request, before)):
            self._places.pop(request.id, None)
            self.held[request.id] = request
        return Folded(reaction.decisions)

    def _end(self, request: Request) -> None:
        self._reactor.forget(request.id)
        for kept in (self.held, self._places, self.open):
            kept.pop(request.id, None)
        if (before := self.ended.get(request.id)) is not None:
            self.ended_bytes -= size_of(before)
        rest = self.ended[request.id] = archived(request)
        self.ended_bytes += size_of(rest)
        self.digests[request.id] = (self.now_ns, request.digest)
        self.ended_bytes = trim_ended(self.ended, self.digests, self.ended_bytes, self.now_ns, self.retention)
        self.forgotten_ns = trim_digests(self.digests, self.now_ns, self.retention) or self.forgotten_ns

    def _diverged(self, request: Request, event: Decision, divergence: Divergence) -> Folded:
        """The log is right (design rule 3): accept a recorded end; fail the request in other cases."""
        ends = {
            RequestFinished: Phase.FINISHED,
            RequestFailed: Phase.FAILED,
            RequestCancelled: Phase.CANCELLED,
        }
        phase = ends.get(type(event), request.phase)
        # An end that is decided and not stored yet is still expected, unless this record is another end.
        expected = request.expected if request.phase.ended and type(event) not in ends else {}
        request = msgspec.structs.replace(
            request, phase=phase, expected=expected, recorded=request.recorded | {event.id}
        )
        if phase.ended:
            self._adopt(Reaction(request))
            return Folded(divergence=divergence)
        failure = Failure(code=divergence.failure_code, message=divergence.message)
        decision = failed(request, failure)
        folded = self._adopt(Reaction(decided(request, decision), (decision,)))
        return Folded(decisions=folded.decisions, divergence=divergence)

    # ---- unreadable records -----------------------------------------------------------------------
    def _malformed(self, address: Address, record: StoredRecord, error: str) -> Folded:
        is_from_server = is_answer_of_server(record.data)
        if address.kind != "request" or is_from_server or not is_addressable(str(address.request_id)):
            return Folded(
                note=f"record {record.seq} on {record.subject[:200]} is unreadable",
                quotation=error,
            )
        failure = Failure(code="malformed_request", message=error, status=400)
        return self._refuse(str(address.request_id), record, failure)

    def _refuse(self, request_id: str, record: StoredRecord, failure: Failure) -> Folded:
        """Refuse one submission without affecting a request that may exist under its id."""
        refusal = RequestRejected(
            id=f"{request_id}.rejected.{record.seq}",
            request_id=request_id,
            failure=failure,
            submission_seq=record.seq,
        )
        self.refusals[refusal.id] = refusal
        note = f"submission {record.seq} ({request_id}) is refused: {failure.code}"
        return Folded((refusal,), note=note, quotation=failure.message)


def _submission(record: StoredRecord, subjects: Subjects) -> RequestSubmitted | None:
    """The event of a record on a submission's subject; None if it is unreadable or does not belong there."""
    try:
        _, event = read_event(record, subjects)
    except MalformedEventError:
        return None
    return event if isinstance(event, RequestSubmitted) else None


def _is_newly_held(request: Request, before: Request | None) -> bool:
    """Tell whether a held request waits for a new resumption, not for one that was already sent."""
    if before is None or before.phase is not Phase.HELD:
        return True
    return (request.attempt, request.resumptions) != (before.attempt, before.resumptions)


def _place(request: Request) -> Place:
    suspicion = request.suspicion
    return Place(
        ranks=request.ranks,
        closed=suspicion.closed,
        proven=suspicion.proven,
        is_quarantined=bool(suspicion.dead_incarnations),
        tenant=request.tenant,
    )
