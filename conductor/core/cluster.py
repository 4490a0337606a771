"""The cluster: every request's state, and the world's, folded from the log one record at a time.

Sans-IO. `fold` takes a record and returns what is decided because of it; `schedule` returns what the
world now allows; `outstanding` returns what was decided but is not in the log, which is all a successor
has to publish when it takes over. Whether to publish is the shell's business: a stand-by folds the same
log and throws the decisions away.

    log ──record──> fold ──> Reactor.fact / Reactor.recorded ──> decisions (expected)
                      └────> world, waiting, ended

Duplicates and late events are normal input. What cannot be read harms nobody: it is refused where a
client wrote it, and noted where one of ours did.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from conductor.core.lifecycle import Phase
from conductor.core.react import Fact, Reaction, Reactor, failed
from conductor.core.request import Decision, RankState, Request, World, archived, decided, submitted
from conductor.core.schedule import Deployment, refuse, schedule
from shared.errors import Divergence
from shared.events import (
    AnyEvent,
    EpochOpened,
    Event,
    Failure,
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
    RequestSubmitted,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkCompleted,
    WalkFailed,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
    submission_digest,
)
from shared.fence import EpochFence
from shared.ids import is_addressable, is_token
from shared.log.port import StoredRecord
from shared.models.base import ModelGraph
from shared.subjects import Address, Subjects

KEEP_ENDED: Final = 10_000
"""Ended requests whose whole state is kept; of older ones only the digest, to know a second copy."""
FORGET_AFTER_NS: Final = 8 * 24 * 3600 * 1_000_000_000
"""Digests of ended requests are kept this long, by the log's time: a day longer than the log keeps events."""


class Entry(msgspec.Struct, frozen=True):
    """A record that could be read: where it is addressed to, and what it says."""

    record: StoredRecord
    address: Address
    event: AnyEvent


class Folded(msgspec.Struct, frozen=True):
    """What came of one record.

    Attributes:
        decisions: to be put into the log, in order.
        void: the record is of a deposed conductor.
        confirmed: the record is a decision, and the same as decided here.
        divergence: the record is a decision, and not the one decided here.
        note: something an operator may want to know; None mostly.
        quotation: the rest of it, where that may quote a client.
    """

    decisions: tuple[Decision, ...] = ()
    void: bool = False
    confirmed: bool = False
    divergence: Divergence | None = None
    note: str | None = None
    quotation: str | None = None


@dataclass(slots=True)
class Cluster:
    """All requests and the world.

    Attributes:
        graph_of: the graph of a family, by name.
        seq: the position folded last; `now_ns` is the log's time there.
        leader: the conductor that opened the highest epoch.
        open: requests that have not ended, in order of submission; `waiting` are those `schedule` may
            still admit: an admission on its way into the log is not among them, but among `_placed`,
            which are the admissions of open requests.
        digests: when requests ended, and their submissions' digests.
        refusals: refused submissions whose refusal is not in the log yet.
    """

    graph_of: Callable[[str], ModelGraph]
    subjects: Subjects
    seq: int = 0
    now_ns: int = 0
    world: World = field(default_factory=World)
    fence: EpochFence = field(default_factory=EpochFence)
    leader: str = ""
    open: dict[str, Request] = field(default_factory=dict)
    ended: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    digests: OrderedDict[str, tuple[int, str]] = field(default_factory=OrderedDict)
    refusals: dict[str, RequestRejected] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)
    _placed: dict[str, RequestAdmitted] = field(default_factory=dict)
    _fresh: dict[str, Request] = field(default_factory=dict)
    _lives: set[str] = field(default_factory=set)
    _reactor: Reactor = field(init=False)

    def __post_init__(self) -> None:
        self._reactor = Reactor(self.graph_of)

    # ---- the three verbs ---------------------------------------------------------------------------
    def fold(self, record: StoredRecord) -> Folded:
        """Take one record of the log, in order."""
        entry = self.read(record)
        return self.apply(entry) if isinstance(entry, Entry) else entry

    def read(self, record: StoredRecord) -> Entry | Folded:
        """The first half of `fold`: what a record says; or what came of it, if it says nothing to us."""
        if record.seq <= self.seq:
            return Folded()
        self.seq, self.now_ns = record.seq, max(self.now_ns, record.time_ns)
        address = self.subjects.parse(record.subject)
        if address is None:
            return Folded(
                note=f"record {record.seq} is on {record.subject[:200]}, which is no subject of ours"
            )
        try:
            event = decode(record.data, address.kind)
            check_address(address, event)
        except MalformedEventError as error:
            return self._malformed(address, record, str(error))
        return Entry(record, address, event)

    def apply(self, entry: Entry) -> Folded:
        """The second half of `fold`."""
        record, event = entry.record, entry.event
        if not self.fence.admits(event):
            return Folded(void=True, note=f"record {record.seq} is of the closed epoch {event.epoch}: void")
        return self.HANDLERS[type(event)](self, entry.address.request_id or "", event, record)

    def schedule(self, deployment: Deployment) -> list[Decision]:
        """What the world allows now. A decision is returned once; it counts when the log shows it."""
        if not self.waiting:
            return []
        refused = [d for r in self._fresh.values() if (d := refuse(r, deployment))]
        self._fresh.clear()
        for refusal in refused:
            self.waiting.pop(str(refusal.request_id))
        admitted = schedule(self.waiting.values(), self._placed.values(), self.world, deployment)
        for decision in admitted:
            self.waiting.pop(str(decision.request_id))
            self._placed[str(decision.request_id)] = decision
        return [*refused, *admitted]

    def outstanding(self) -> list[Decision]:
        """Decided, but not in the log: what a successor publishes, in order of submission."""
        requests = (*self.ended.values(), *self.open.values())
        return [*self.refusals.values(), *(d for r in requests for d in r.expected.values())]

    def request(self, request_id: str) -> Request | None:
        """A request that is open, or ended not long ago."""
        return self.open.get(request_id) or self.ended.get(request_id)

    # ---- by kind of event --------------------------------------------------------------------------
    # Which one takes which kind: `HANDLERS`, below.
    def _submitted(self, request_id: str, event: RequestSubmitted, record: StoredRecord) -> Folded:
        known = self.request(request_id)
        digest = known.digest if known else self.digests.get(request_id, (0, None))[1]
        if digest is None:
            request = submitted(request_id, event, record.seq, record.data)
            self.open[request_id] = self.waiting[request_id] = self._fresh[request_id] = request
            return Folded()
        if digest == submission_digest(event):
            return Folded(note=f"request {request_id} was submitted again, the same: it is answered once")
        message = f"request_id {request_id} is taken by another request; use a new one"
        return self._refuse(
            request_id, record, Failure(code="request_id_conflict", message=message, status=409)
        )

    def _fact(self, request_id: str, event: Fact, record: StoredRecord) -> Folded:
        request = self.open.get(request_id)
        if request is None:
            return Folded()  # late: the request has ended, or was never submitted
        return self._take(self._reactor.fact(request, event, record.data, self.world))

    def _decision(self, request_id: str, event: Decision, record: StoredRecord) -> Folded:
        if isinstance(event, RequestRejected) and self.refusals.pop(event.id, None) is not None:
            return Folded(confirmed=True)
        request = self.request(request_id)
        if request is None:
            return Folded()
        confirmed = event.id in request.expected
        try:
            reaction = self._reactor.recorded(request, event, record.data, self.world)
        except Divergence as divergence:
            return self._diverged(request, event, divergence)
        folded = self._take(reaction)
        return Folded(decisions=folded.decisions, confirmed=confirmed)

    def _joined(self, _: str, event: WorkerJoined, record: StoredRecord) -> Folded:
        if event.id in self._lives:
            return Folded()  # a second copy of a life's beginning, perhaps of one that is over
        self._lives.add(event.id)
        # A copy said again later names its life: the log may have forgotten where that began.
        incarnation = event.incarnation or record.seq
        state = RankState(incarnation=incarnation, kv_tokens=event.kv_tokens, max_seq_len=event.max_seq_len)
        self.world = World(ranks=self.world.ranks | {event.rank: state})
        decisions: list[Decision] = []
        for request in list(self.open.values()):
            reaction = self._reactor.fact(request, event, record.data, self.world)
            decisions += self._take(reaction).decisions
        return Folded(tuple(decisions), note=f"rank {event.rank} joined as incarnation {incarnation}")

    def _left(self, _: str, event: WorkerLeaving | WorkerLost, record: StoredRecord) -> Folded:
        state = self.world.ranks.get(event.rank)
        if state is None or state.incarnation != event.incarnation:
            return Folded()  # of a life that is over already
        away = msgspec.structs.replace(state, incarnation=None)
        self.world = World(ranks=self.world.ranks | {event.rank: away})
        return Folded(note=f"rank {event.rank} left; its requests wait for it to join again")

    def _opened(self, _: str, event: EpochOpened, record: StoredRecord) -> Folded:
        self.leader = event.conductor
        # What the deposed conductor was about to admit is void: it waits again.
        self.waiting = {r.id: r for r in self.open.values() if r.phase is Phase.WAITING}
        self._placed = {r.id: r.admitted for r in self.open.values() if r.admitted is not None}
        self._fresh = dict(self.waiting)
        return Folded()

    def _nothing(self, _: str, event: Event, record: StoredRecord) -> Folded:
        return Folded()

    # A table, not a `match`: that tries case after case, and the last of twenty took 3 us.
    # That none is missing is a test's to say.
    HANDLERS: ClassVar[dict[type[Event], Callable[["Cluster", str, Any, StoredRecord], Folded]]] = {
        EpochOpened: _opened,
        RequestSubmitted: _submitted,
        RequestAdmitted: _decision,
        RequestRejected: _decision,
        NodeReady: _decision,
        WalkStop: _decision,
        OutputFence: _decision,
        RequestFinished: _decision,
        RequestFailed: _decision,
        RequestCancelled: _decision,
        RequestCancel: _fact,
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
    }

    # ---- keeping -----------------------------------------------------------------------------------
    def _take(self, reaction: Reaction) -> Folded:
        request = reaction.request
        if request.phase is not Phase.WAITING:
            self.waiting.pop(request.id, None)
            self._fresh.pop(request.id, None)
        if not request.phase.ended:
            self.open[request.id] = request
            if request.admitted is not None:
                self._placed[request.id] = request.admitted
            return Folded(reaction.decisions)
        self._reactor.forget(request.id)
        self._placed.pop(request.id, None)
        self.open.pop(request.id, None)
        self.ended[request.id] = archived(request)
        self.digests[request.id] = (self.now_ns, request.digest)
        self._forget()
        return Folded(reaction.decisions)

    def _forget(self) -> None:
        while len(self.ended) > KEEP_ENDED:
            self.ended.popitem(last=False)
        while self.digests and next(iter(self.digests.values()))[0] < self.now_ns - FORGET_AFTER_NS:
            self.digests.popitem(last=False)

    def _diverged(self, request: Request, event: Decision, divergence: Divergence) -> Folded:
        """The log is right (design rule 3): a recorded end stands; anything else ends the request."""
        request = msgspec.structs.replace(request, expected={}, recorded=request.recorded | {event.id})
        ends = {
            RequestFinished: Phase.FINISHED,
            RequestFailed: Phase.FAILED,
            RequestCancelled: Phase.CANCELLED,
        }
        if (phase := ends.get(type(event))) is not None or request.phase.ended:
            self._take(Reaction(msgspec.structs.replace(request, phase=phase or request.phase)))
            return Folded(divergence=divergence)
        failure = Failure(code=divergence.failure_code, message=divergence.message)
        decision = failed(request, failure)
        folded = self._take(Reaction(decided(request, decision), (decision,)))
        return Folded(decisions=folded.decisions, divergence=divergence)

    # ---- what cannot be read -----------------------------------------------------------------------
    def _malformed(self, address: Address, record: StoredRecord, error: str) -> Folded:
        if address.kind != "request" or not is_addressable(str(address.request_id)):
            return Folded(note=f"record {record.seq} on {record.subject[:200]} is ignored", quotation=error)
        failure = Failure(code="malformed_request", message=error, status=400)
        return self._refuse(str(address.request_id), record, failure)

    def _refuse(self, request_id: str, record: StoredRecord, failure: Failure) -> Folded:
        """Refuse one submission without touching the request that may exist under its id."""
        refusal = RequestRejected(
            id=f"{request_id}.rejected.{record.seq}",
            request_id=request_id,
            failure=failure,
            submission_seq=record.seq,
        )
        self.refusals[refusal.id] = refusal
        note = f"submission {record.seq} ({request_id}) is refused, {failure.code}"
        return Folded((refusal,), note=note, quotation=failure.message)


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "request": (RequestSubmitted,),
    "control": (RequestCancel,),
    "walk": (RequestAdmitted, RequestRejected, RequestFinished, RequestFailed, RequestCancelled),
    "ready": (NodeReady, WalkStop),
    "done": (WalkCompleted, WalkFailed, WalkStopped),
    "edge": (NodeFired, StreamSent, StreamTaken, TensorsReleased),
    "worker": (WorkerJoined, WorkerLeaving),
    "conductor": (EpochOpened, WorkerLost),
    "output": (OutputChunk, OutputFence),
}


def check_address(address: Address, event: AnyEvent) -> None:
    """What the subject says and what the event says must agree: permissions rest on the subject."""
    if not isinstance(event, _KINDS[address.kind]):
        raise MalformedEventError(f"a {type(event).__name__} does not belong on a {address.kind} subject")
    request_id = address.request_id
    if request_id is None:
        return
    if address.kind == "request" and not is_token(request_id):
        raise MalformedEventError(
            f"request_id {request_id[:80]!r}: expected 1 to 64 letters, digits, '_' or '-'"
        )
    if event.request_id not in (None, request_id):
        raise MalformedEventError(
            f"the subject is of request {request_id}, the event of {str(event.request_id)[:80]!r}"
        )
    if address.rank is not None and getattr(event, "rank", address.rank) != address.rank:
        raise MalformedEventError(f"the subject is of rank {address.rank}, the event of another")
