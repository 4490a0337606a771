"""What a worker makes of the log: which orders are for this life of it, each once, and what belongs to them.

A pure fold over the records a worker reads, in log order: its own orders (`ready`), what other ranks tell it
(`edge`), the requests' ends (`walk`), all lives (`worker`) and the conductors' terms (`conductor`).
Duplicates, late and void records are normal input and lead to nothing. No I/O, no clock; the shell
(`workers.process`) feeds it, the executor obeys.

    record ──> fence ──> own joined?      ──> IncarnationBegun      from here on it has an incarnation
                    ├──> node.ready       ──> StartOrder       once per (request, attempt, index)
                    ├──> walk.stop        ──> StopOrder        its attempt is over
                    ├──> request.resumed  ──> AttemptEnded        so are the attempts before it
                    ├──> an edge          ──> ReceivedEdge       from a life that the order names; early ones wait
                    ├──> a request's end  ──> RequestEnded
                    ├──> other ranks      ──> PeerJoined, PeerLeft
                    ├──> this rank again  ──> IncarnationSuperseded  this process is a zombie: it must exit
                    └──> worker.lost      ──> IncarnationLost        given up for dead: it must join again
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
from shared.subject_rules import check_address
from shared.subjects import Address, Subjects
from workers.membership.peers import PeerIncarnations, PeerJoined, PeerLeft
from workers.orders.out_of_order_buffer import OutOfOrderBuffer, ReceivedEdge

REMEMBERED_REQUESTS: Final = 16_384
"""Far more than can be open at once; a duplicate older than that is caught by the executor or harmless."""


class StepKey(NamedTuple):
    """One try of one step of one request: what one `node.ready` orders."""

    request_id: str
    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.attempt}.{self.step}"


@dataclass(frozen=True, slots=True)
class IncarnationBegun:
    """The own `worker.joined` was read: this life has begun."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Run this. Lower attempts of the request are over.

    `heard` is what was told for it before it came; `refused` says why some of that is missing, where it is:
    the order cannot be carried out.
    """

    key: StepKey
    order: NodeReady
    heard: tuple[ReceivedEdge, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Drop this. `started` is false when the order came behind its own stop: it must not run at all."""

    key: StepKey
    order: WalkStop
    started: bool = True


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Attempts up to this one are over, and what was kept for them is free. The request itself goes on."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over, however: forget it, and free what was kept for it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class IncarnationSuperseded:
    """A newer life of this rank has begun; whatever this one still does is void."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class IncarnationLost:
    """The conductor has given this life up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is none of ours, or not where it is; it changes nothing.

    `quotation` is the rest of the note, where that may quote what a client wrote.
    """

    note: str
    quotation: str | None = None


Action: TypeAlias = (
    IncarnationBegun | StartOrder | StopOrder | AttemptEnded | ReceivedEdge | RequestEnded | PeerJoined | PeerLeft | IncarnationSuperseded | IncarnationLost | Unreadable
)

_KINDS: Final = frozenset({"ready", "edge", "walk", "worker", "conductor"})


@dataclass(slots=True)
class _Steps:
    """What was ordered of one request, in its highest attempt; `over` says that this is over."""

    attempt: int
    over: bool = False
    started: set[int] = field(default_factory=set)
    stopped: dict[int, WalkStop] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)  # of the ranks it is placed on, by its last order


class Inbox:
    """One life's fold.

    Args:
        joined_id: the event id of the own `worker.joined`.
        earlier_lives: event ids of lives that were in the log before: a copy of one of them, stored late,
            is no newer life.
        lives: all ranks' lives before the first record; their ids are earlier ones, too.
        epoch: the highest epoch opened before the first record.
        early: where edges wait that are earlier than their order.

    Attributes:
        incarnation: None until the own `worker.joined` was read.
    """

    def __init__(
        self,
        subjects: Subjects,
        rank: Rank,
        joined_id: str,
        *,
        earlier_lives: Iterable[str] = (),
        lives: PeerIncarnations | None = None,
        epoch: int = 0,
        remembered: int = REMEMBERED_REQUESTS,
        early: OutOfOrderBuffer | None = None,
    ) -> None:
        self.incarnation: Incarnation | None = None
        self._subjects = subjects
        self._rank = rank
        self._joined_id = joined_id
        self._lives = lives if lives is not None else PeerIncarnations()
        self._lives.known.update(earlier_lives)
        self._fence = EpochFence(epoch)
        self._remembered = remembered
        self._requests: OrderedDict[str, _Steps] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._early = early if early is not None else OutOfOrderBuffer()

    def fold(self, record: StoredRecord) -> Action | None:
        """Take one record, in log order; what is to be done because of it."""
        address = self._subjects.parse(record.subject)
        if address is None or address.kind not in _KINDS:
            return Unreadable(f"record {record.seq} on {record.subject} is nothing a worker reads")
        try:
            event = decode(record.data)
            check_address(address, event)
        except MalformedEventError as error:
            return Unreadable(f"record {record.seq} on {record.subject} is no event", quotation=str(error))
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
                return self._lives.ended(event)
            case WorkerLost():
                ours = self._is_ours(event.rank, event.incarnation)
                return IncarnationLost(event.reason) if ours else self._lives.ended(event)
            case NodeFired() | StreamSent() | StreamTaken() | TensorsReleased():
                return self._edge(event, address, len(record.data))
            case RequestFinished() | RequestFailed() | RequestCancelled():
                return self._end(event)
            case RequestResumed():
                return self._resumed(event)
            case _:
                return None

    # ---- lives -------------------------------------------------------------------------------------
    def _joined(self, event: WorkerJoined, seq: int) -> IncarnationBegun | IncarnationSuperseded | PeerJoined | None:
        if event.rank != self._rank:
            return self._lives.joined(event, seq)
        if event.id in self._lives.known:
            return None
        self._lives.known.add(event.id)
        if event.id == self._joined_id:
            self.incarnation = Incarnation(seq)
            return IncarnationBegun(self.incarnation)
        # Stored ahead of ours it is an earlier life; behind ours it is the one that counts now.
        return None if self.incarnation is None else IncarnationSuperseded(Incarnation(seq))

    def _is_ours(self, rank: int, incarnation: int | None) -> bool:
        return rank == self._rank and self.incarnation is not None and incarnation == self.incarnation

    # ---- orders ------------------------------------------------------------------------------------
    def _ready(self, order: NodeReady) -> StartOrder | StopOrder | None:
        steps = self._steps(order)
        if steps is None or order.index in steps.started:
            return None
        steps.started.add(order.index)
        steps.lives = order.lives
        key = StepKey(str(order.request_id), order.attempt, order.index)
        stop = steps.stopped.get(order.index)
        heard = self._early.take(key.request_id, lambda early: _is_for(early.event, key))
        if stop is not None:
            return StopOrder(key, stop, started=False)
        counting = tuple(early for early in heard if _is_of(early, order.lives))
        return StartOrder(key, order, counting, self._early.refused(key.request_id, key.attempt))

    def _stop(self, order: WalkStop) -> StopOrder | None:
        steps = self._steps(order)
        if steps is None or order.index in steps.stopped:
            return None
        steps.stopped[order.index] = order
        steps.over = True
        self._early.begin(str(order.request_id), order.attempt + 1)
        if order.index not in steps.started:
            return None  # its order may still come: it was sent again, and is stored behind this
        return StopOrder(StepKey(str(order.request_id), order.attempt, order.index), order)

    def _steps(self, order: NodeReady | WalkStop) -> _Steps | None:
        """The steps of the order's attempt; None for another life's order, or an attempt that is over."""
        if order.request_id is None or not self._is_ours(order.rank, order.incarnation):
            return None
        if order.request_id in self._ended:
            return None  # a late copy
        steps = self._requests.get(order.request_id)
        if steps is None or order.attempt > steps.attempt:
            steps = self._requests[order.request_id] = _Steps(order.attempt)
            self._early.begin(order.request_id, order.attempt)
        self._requests.move_to_end(order.request_id)
        while len(self._requests) > self._remembered:
            self._requests.popitem(last=False)
        return steps if order.attempt == steps.attempt else None

    def _resumed(self, event: RequestResumed) -> AttemptEnded | None:
        """The request goes on in a later attempt, here or elsewhere."""
        request_id = str(event.request_id)
        self._early.begin(request_id, event.attempt)
        steps = self._requests.get(request_id)
        if steps is None or steps.attempt >= event.attempt:
            return None
        self._requests[request_id] = _Steps(event.attempt)
        return AttemptEnded(request_id, steps.attempt)

    def _end(self, event: RequestFinished | RequestFailed | RequestCancelled) -> RequestEnded | None:
        request_id = str(event.request_id)
        if request_id in self._ended:
            return None
        self._ended[request_id] = None
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        self._requests.pop(request_id, None)
        self._early.end(request_id)
        return RequestEnded(request_id)

    # ---- edges -------------------------------------------------------------------------------------
    def _edge(self, event: EdgeEvent, address: Address, nbytes: int) -> ReceivedEdge | Unreadable | None:
        if address.to_rank != self._rank or address.rank is None or event.request_id != address.request_id:
            return Unreadable(f"a {type(event).__name__} from rank {address.rank} is not for this rank")
        if event.to_life is not None and event.to_life != self.incarnation:
            return None  # told to an earlier life: its requests may have ended before this one began
        request_id = str(event.request_id)
        heard, steps = ReceivedEdge(event, address.rank), self._requests.get(request_id)
        attempt = steps.attempt if steps is not None else 0
        if request_id in self._ended or event.attempt < attempt:
            return None  # nobody waits for it any more
        if steps is not None and steps.over and event.attempt == attempt:
            return None
        if steps is not None and event.attempt == attempt and self._is_due(event, steps):
            return heard if _is_of(heard, steps.lives) else None
        self._early.add(request_id, heard, nbytes)
        return None

    @staticmethod
    def _is_due(event: EdgeEvent, steps: _Steps) -> bool:
        """Whether its order was read: a firing belongs to one step, all else to the whole attempt."""
        return event.index in steps.started if isinstance(event, NodeFired) else bool(steps.started)


def _is_for(event: EdgeEvent, key: StepKey) -> bool:
    """Whether an early edge waited for this order."""
    if event.attempt != key.attempt:
        return False
    return event.index == key.step if isinstance(event, NodeFired) else True


def _is_of(heard: ReceivedEdge, lives: Mapping[int, int]) -> bool:
    """Whether it is from a life that the order names."""
    return heard.event.incarnation is not None and lives.get(heard.rank) == heard.event.incarnation
