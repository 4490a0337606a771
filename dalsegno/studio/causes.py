"""Which record an event follows from: an order for its report, the fact that made a decision due. Pure.

decision of `react`    the record after whose fold the decision is expected
admission, refusal     the submission
resumption             the fence before it
report, edge, chunk    the order to the rank that wrote it
lost worker            the `worker.joined` of its incarnation
joined worker          the loss, or the leaving, of its predecessor
"""

from collections.abc import Mapping

from dalsegno.replay.timeline import ReplayTimeline
from shared.events import (
    AnyEvent,
    DeadlinePassed,
    NodeReady,
    OutputChunk,
    OutputFence,
    RequestAdmitted,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.subjects import Address, worker_writer


def causes_of(timeline: ReplayTimeline) -> dict[int, int]:
    """Return, by position, the position of the record that an event follows from, where there is one."""
    found = _Causes()
    for position in timeline.positions:
        seq = position.record.seq
        address = timeline.subjects.parse(position.record.subject)
        if address is not None and position.event is not None:
            found.take(seq, address, position.event)
        for request_id, request in position.requests.items():
            found.expect(seq, request_id, request.expected)
    return found.causes


def effects_of(causes: Mapping[int, int]) -> dict[int, list[int]]:
    """Return, by position, the positions of the records that follow from it."""
    found: dict[int, list[int]] = {}
    for effect, cause in causes.items():
        found.setdefault(cause, []).append(effect)
    return found


class _Causes:
    """The fold of a history; `causes` is its result."""

    def __init__(self) -> None:
        self.causes: dict[int, int] = {}
        self._born: dict[str, int] = {}
        self._expected: dict[str, object] = {}
        self._submitted: dict[str, int] = {}
        self._fenced: dict[str, int] = {}
        self._orders: dict[tuple[str, int, int, int], int] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._joined: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def expect(self, seq: int, request_id: str, expected: Mapping[str, object]) -> None:
        """Note the decisions of a request that are due after a record."""
        if self._expected.get(request_id) is expected:
            return
        self._expected[request_id] = expected
        for decision in expected:
            self._born.setdefault(decision, seq)

    def take(self, seq: int, address: Address, event: AnyEvent) -> None:
        """Note the cause of one event."""
        cause = self._cause(seq, address, event)
        if cause is not None and cause != seq:
            self.causes[seq] = cause

    def _cause(self, seq: int, address: Address, event: AnyEvent) -> int | None:
        request_id = str(address.request_id)
        match event:
            case WorkerJoined():
                before = self._ended.get(event.rank)
                self._joined[event.incarnation or seq] = seq
                return before
            case WorkerLost() | WorkerLeaving():
                self._ended[event.rank] = seq
                return self._joined.get(event.incarnation or 0)
            case RequestSubmitted():
                self._submitted.setdefault(request_id, seq)
                return None
            case RequestAdmitted() | RequestRejected() | DeadlinePassed():
                return self._born.get(event.id) or self._submitted.get(request_id)
            case RequestResumed():
                return self._fenced.get(request_id)
            case OutputFence():
                self._fenced[request_id] = seq
            case NodeReady():
                self._orders.setdefault((request_id, event.attempt, event.index, event.rank), seq)
                self._newest[request_id, worker_writer(event.rank)] = seq
            case OutputChunk():
                return self._newest.get((request_id, event.writer))
            case _ if address.kind in ("done", "edge") and address.rank is not None:
                exact = self._orders.get((request_id, event.attempt, event.index, address.rank))
                by_rank = self._newest.get((request_id, worker_writer(address.rank)))
                return by_rank if address.kind == "edge" and exact is None else exact
            case _:
                pass
        return self._born.get(event.id)
