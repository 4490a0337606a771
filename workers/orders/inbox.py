"""Fold of the log into actions for one incarnation of a worker: its orders, each once, and all they need.

A pure fold over the records that a worker reads, in log order: its own orders (`ready`), edges of other ranks
(`edge`), ends of requests (`walk`), incarnations (`worker`) and the conductors' epochs (`conductor`).
Duplicates, late records and void records are normal input and cause no action. No I/O, no clock:
`workers.process` feeds the inbox and passes its actions to `workers.execution.executor`.

    record ──> epoch fence ──> own worker.joined ──> IncarnationBegun
                          ├──> node.ready        ──> StartOrder     once per (request, attempt, index)
                          ├──> walk.stop         ──> StopOrder      the attempt is over
                          ├──> request.resumed   ──> AttemptEnded   earlier attempts are over
                          ├──> an edge event     ──> ReceivedEdge   held back until its order is read
                          ├──> a request's end   ──> RequestEnded
                          ├──> other ranks       ──> PeerJoined, PeerLeft
                          ├──> this rank again   ──> IncarnationSuperseded   a zombie: it must exit
                          └──> worker.lost       ──> IncarnationLost         declared dead: it must join again
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from shared.epoch_fence import EpochFence
from shared.events import (
    EdgeEvent,
    MalformedEventError,
    NodeFired,
    NodeReady,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestResumed,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkStop,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
)
from shared.ids import Incarnation, Rank
from shared.log.port import StoredRecord
from shared.subject_rules import check_event_subject
from shared.subjects import Address, Subjects
from workers.membership.peers import PeerIncarnations, PeerJoined, PeerLeft
from workers.orders.out_of_order_buffer import OutOfOrderBuffer, ReceivedEdge

REMEMBERED_REQUESTS: Final = 16_384
"""Far more requests than can be open. An older duplicate is ignored by the executor, or harmless."""


class StepKey(NamedTuple):
    """One attempt of one step of one request: the unit that one `node.ready` orders."""

    request_id: str
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.attempt}.{self.step}"


@dataclass(frozen=True, slots=True)
class IncarnationBegun:
    """The process has read its own `worker.joined`: its incarnation has begun."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Run an order. Lower attempts of the request are over.

    `edges` are the edges received before the order. `refused` is the reason why some of them are missing, in
    which case the order has to fail; empty otherwise.
    """

    key: StepKey
    order: NodeReady
    edges: tuple[ReceivedEdge, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Drop an order. `started` is false if the order came after its own stop: it must not run at all."""

    key: StepKey
    order: WalkStop
    started: bool = True


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Attempts up to this one are over; their state can be released. The request continues."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request has finished, failed or been cancelled; its state can be released."""

    request_id: str


@dataclass(frozen=True, slots=True)
class IncarnationSuperseded:
    """A newer incarnation of this rank has begun; all further events of this one are void."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class IncarnationLost:
    """The conductor has declared this incarnation dead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An invalid record, or one on a wrong subject; it changes nothing.

    `quotation` is the part of the note that may quote a client's text.
    """

    note: str
    quotation: str | None = None


Action: TypeAlias = (
    IncarnationBegun
    | StartOrder
    | StopOrder
    | AttemptEnded
    | ReceivedEdge
    | RequestEnded
    | PeerJoined
    | PeerLeft
    | IncarnationSuperseded
    | IncarnationLost
    | Unreadable
)

_KINDS: Final = frozenset({"ready", "edge", "walk", "worker", "conductor"})


@dataclass(slots=True)
class _AttemptOrders:
    """The orders of one request's highest attempt.

    Attributes:
        over: the attempt is over.
        incarnations: by rank, the incarnations that the last order names.
    """

    attempt: int
    over: bool = False
    started: set[int] = field(default_factory=set)
    stopped: dict[int, WalkStop] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)


class Inbox:
    """The fold for one incarnation of a worker.

    Args:
        joined_id: the event id of this process's own `worker.joined`.
        earlier_joins: event ids of earlier `worker.joined` events. A copy of one, stored late, begins no new
            incarnation.
        peers: the incarnations of all ranks before the first record; their event ids count as earlier, too.
        epoch: the highest epoch opened before the first record.
        out_of_order: holds edges that arrive before their order.

    Attributes:
        incarnation: None until the own `worker.joined` was read.
    """

    def __init__(
        self,
        subjects: Subjects,
        rank: Rank,
        joined_id: str,
        *,
        earlier_joins: Iterable[str] = (),
        peers: PeerIncarnations | None = None,
        epoch: int = 0,
        remembered: int = REMEMBERED_REQUESTS,
        out_of_order: OutOfOrderBuffer | None = None,
    ) -> None:
        self.incarnation: Incarnation | None = None
        self._subjects = subjects
        self._rank = rank
        self._joined_id = joined_id
        self._peers = peers if peers is not None else PeerIncarnations()
        self._peers.known.update(earlier_joins)
        self._fence = EpochFence(epoch)
        self._remembered = remembered
        self._requests: OrderedDict[str, _AttemptOrders] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._out_of_order = out_of_order if out_of_order is not None else OutOfOrderBuffer()

    def fold(self, record: StoredRecord) -> Action | None:
        """Fold one record, in log order; return the action it causes."""
        address = self._subjects.parse(record.subject)
        if address is None or address.kind not in _KINDS:
            return Unreadable(
                f"record {record.seq} on {record.subject} is not on a subject that a worker reads"
            )
        try:
            event = decode(record.data)
            check_event_subject(address, event)
        except MalformedEventError as error:
            return Unreadable(
                f"record {record.seq} on {record.subject} is not a valid event", quotation=str(error)
            )
        if not self._fence.admits(event):
            return None  # of a deposed conductor
        match event:
            case NodeReady():
                return self._ready(event)
            case WalkStop():
                return self._stop(event)
            case WorkerJoined():
                return self._joined(event, record.seq)
            case WorkerLeaving():
                return self._peers.ended(event)
            case WorkerLost():
                ours = self._is_ours(event.rank, event.incarnation)
                return IncarnationLost(event.reason) if ours else self._peers.ended(event)
            case NodeFired() | StreamSent() | StreamTaken() | TensorsReleased():
                return self._edge(event, address, len(record.data))
            case RequestFinished() | RequestFailed() | RequestCancelled():
                return self._end(event)
            case RequestResumed():
                return self._resumed(event)
            case _:
                return None

    # ---- incarnations ------------------------------------------------------------------------------
    def _joined(
        self, event: WorkerJoined, seq: int
    ) -> IncarnationBegun | IncarnationSuperseded | PeerJoined | None:
        if event.rank != self._rank:
            return self._peers.joined(event, seq)
        if event.id in self._peers.known:
            return None
        self._peers.known.add(event.id)
        if event.id == self._joined_id:
            self.incarnation = Incarnation(seq)
            return IncarnationBegun(self.incarnation)
        # Stored before the own one, it is an earlier incarnation; stored after it, the current one.
        return None if self.incarnation is None else IncarnationSuperseded(Incarnation(seq))

    def _is_ours(self, rank: int, incarnation: int | None) -> bool:
        return rank == self._rank and self.incarnation is not None and incarnation == self.incarnation

    # ---- orders ------------------------------------------------------------------------------------
    def _ready(self, order: NodeReady) -> StartOrder | StopOrder | None:
        steps = self._steps(order)
        if steps is None or order.index in steps.started:
            return None
        steps.started.add(order.index)
        steps.incarnations = order.lives
        key = StepKey(str(order.request_id), order.attempt, order.index)
        stop = steps.stopped.get(order.index)
        waiting = self._out_of_order.take(key.request_id, lambda edge: _is_for(edge.event, key))
        if stop is not None:
            return StopOrder(key, stop, started=False)
        valid = tuple(edge for edge in waiting if _is_from(edge, order.lives))
        return StartOrder(key, order, valid, self._refused(key, order))

    def _refused(self, key: StepKey, order: NodeReady) -> str:
        """The reason why edges of the ranks that have a part in the order are missing; empty if none are."""
        return self._out_of_order.refused(key.request_id, key.attempt, order.lives)

    def _stop(self, order: WalkStop) -> StopOrder | None:
        steps = self._steps(order)
        if steps is None or order.index in steps.stopped:
            return None
        steps.stopped[order.index] = order
        steps.over = True
        self._out_of_order.begin(str(order.request_id), order.attempt + 1)
        if order.index not in steps.started:
            return None  # a resent copy of its order may still follow in the log
        return StopOrder(StepKey(str(order.request_id), order.attempt, order.index), order)

    def _steps(self, order: NodeReady | WalkStop) -> _AttemptOrders | None:
        """The orders of the order's attempt; None for another incarnation's order, or a lower attempt."""
        if order.request_id is None or not self._is_ours(order.rank, order.incarnation):
            return None
        if order.request_id in self._ended:
            return None  # a late duplicate
        steps = self._requests.get(order.request_id)
        if steps is None or order.attempt > steps.attempt:
            steps = self._requests[order.request_id] = _AttemptOrders(order.attempt)
            self._out_of_order.begin(order.request_id, order.attempt)
        self._requests.move_to_end(order.request_id)
        while len(self._requests) > self._remembered:
            self._requests.popitem(last=False)
        return steps if order.attempt == steps.attempt else None

    def _resumed(self, event: RequestResumed) -> AttemptEnded | None:
        """End the earlier attempts: the request continues in a later one, on this rank or another."""
        request_id = str(event.request_id)
        self._out_of_order.begin(request_id, event.attempt)
        steps = self._requests.get(request_id)
        if steps is None or steps.attempt >= event.attempt:
            return None
        self._requests[request_id] = _AttemptOrders(event.attempt)
        return AttemptEnded(request_id, steps.attempt)

    def _end(self, event: RequestFinished | RequestFailed | RequestCancelled) -> RequestEnded | None:
        request_id = str(event.request_id)
        if request_id in self._ended:
            return None
        self._ended[request_id] = None
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        self._requests.pop(request_id, None)
        self._out_of_order.end(request_id)
        return RequestEnded(request_id)

    # ---- edges -------------------------------------------------------------------------------------
    def _edge(self, event: EdgeEvent, address: Address, nbytes: int) -> ReceivedEdge | Unreadable | None:
        if address.to_rank != self._rank or address.rank is None or event.request_id != address.request_id:
            return Unreadable(f"a {type(event).__name__} from rank {address.rank} is not for this rank")
        if event.to_life is not None and event.to_life != self.incarnation:
            return None  # for an earlier incarnation, whose requests may have ended before this one began
        request_id = str(event.request_id)
        edge, steps = ReceivedEdge(event, address.rank), self._requests.get(request_id)
        attempt = steps.attempt if steps is not None else 0
        if request_id in self._ended or event.attempt < attempt:
            return None  # nothing waits for it any more
        if steps is not None and steps.over and event.attempt == attempt:
            return None
        if steps is not None and event.attempt == attempt and self._is_due(event, steps):
            return edge if _is_from(edge, steps.incarnations) else None
        if not self._peers.is_current(address.rank, event.incarnation):
            return None  # from no process that can have an order: of an unknown rank, or an ended incarnation
        self._out_of_order.add(request_id, edge, nbytes)
        return None

    @staticmethod
    def _is_due(event: EdgeEvent, steps: _AttemptOrders) -> bool:
        """True if its order was read: a firing belongs to one step, other edges to the whole attempt."""
        return event.index in steps.started if isinstance(event, NodeFired) else bool(steps.started)


def _is_for(event: EdgeEvent, key: StepKey) -> bool:
    """True if an out-of-order edge waited for this order."""
    if event.attempt != key.attempt:
        return False
    return event.index == key.step if isinstance(event, NodeFired) else True


def _is_from(edge: ReceivedEdge, incarnations: Mapping[int, int]) -> bool:
    """True if the sender is an incarnation that the order names."""
    return edge.event.incarnation is not None and incarnations.get(edge.rank) == edge.event.incarnation
