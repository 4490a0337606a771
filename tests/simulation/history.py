"""One finished history, as its log shows it: the input of the invariants."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import msgspec

from conductor.core import snapshot
from conductor.core.cluster import Cluster, Folded
from conductor.core.request import Request
from shared.events import (
    AnyEvent,
    Event,
    NodeReady,
    OutputChunk,
    OutputFence,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkFailed,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.log.port import StoredRecord
from shared.transcript import Transcript
from tests.conductor.script import SUBJECTS
from tests.simulation.conductors import is_for_conductors
from tests.simulation.simulator import ENDS, Simulation

End = RequestFinished | RequestFailed | RequestCancelled | RequestRejected


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a rank: its first and last record, and how it ended; None while it has not.

    `killer` is the request that killed its process, if one did.
    """

    rank: int
    incarnation: int
    end_seq: int | None = None
    end: str | None = None
    killer: str | None = None

    @property
    def died(self) -> bool:
        """True if it ended, and not in order."""
        return self.end_seq is not None and self.end != WorkerLeaving.__name__


@dataclass(slots=True)
class Past:
    """The log of a history, analysed.

    Attributes:
        valid: the valid events, with their sequence numbers.
        submissions: the first readable submission of each request; `ends`, how each ended.
        orders: the first copy of each order.
        lives: the incarnations of all ranks; `under`, by incarnation, the requests that ran when it
            ended;
            `blamed`, the requests by which an incarnation was found to have ended.
    """

    sim: Simulation
    valid: list[tuple[int, AnyEvent]] = field(default_factory=list)
    submissions: dict[str, tuple[int, RequestSubmitted]] = field(default_factory=dict)
    ends: defaultdict[str, dict[str, tuple[int, End]]] = field(default_factory=lambda: defaultdict(dict))
    orders: dict[str, tuple[int, NodeReady]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    blamed: set[str] = field(default_factory=set)
    under: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def of(cls, sim: Simulation) -> "Past":
        past = cls(sim, sim.log.valid())
        for seq, event in past.valid:
            request_id = str(event.request_id)
            if isinstance(event, RequestSubmitted):
                past.submissions.setdefault(request_id, (seq, event))
            elif past._ends(event):
                past.ends[request_id].setdefault(event.id + type(event).__name__, (seq, event))
            elif isinstance(event, NodeReady):
                past.orders.setdefault(event.id, (seq, event))
        past.lives = list(_lives(sim, past.valid))
        past._look_under()
        return past

    def is_of(self, request_id: str, kind: str) -> bool:
        """True if an id belongs to a request of this kind."""
        submission = self.submissions.get(request_id)
        return submission is not None and submission[1].inputs.text == kind

    def was_taken(self, request_id: str) -> bool:
        """True if the first record under an id is unreadable: no request can use the id."""
        written = self.sim.log.by_subject[SUBJECTS.request(request_id)]
        return bool(written) and self.sim.log.events[written[0] - 1] is None

    def _ends(self, event: AnyEvent) -> TypeGuard[End]:
        """True if the event ends its request.

        A rejection may belong to another submission under the same id. Of a rejection and another
        end, both
        decided before either was stored, the first in the log is the end; the other is void.
        """
        known = [end for _, end in self.ends.get(str(event.request_id), {}).values()]
        if isinstance(event, RequestRejected):
            first_seq, _ = self.submissions.get(str(event.request_id), (None, None))
            return event.submission_seq == first_seq and not any(isinstance(end, ENDS) for end in known)
        return isinstance(event, ENDS) and not any(isinstance(end, RequestRejected) for end in known)

    def end_of(self, request_id: str) -> End:
        """The event that ended a request."""
        ((_, end),) = self.ends[request_id].values()
        return end

    def of_kind(self, kind: type[Event], request_id: str | None = None) -> list[tuple[int, Any]]:
        """The events of one type, duplicates included."""
        return [
            (seq, event)
            for seq, event in self.valid
            if isinstance(event, kind) and request_id in (None, event.request_id)
        ]

    def transcript(self, request_id: str) -> tuple[Transcript, list[OutputChunk]]:
        """The valid chunks of a request, in order."""
        transcript, chunks = Transcript(), []
        end_seq = min((seq for seq, _ in self.ends[request_id].values()), default=len(self.valid) + 1)
        for seq, event in self.valid:
            if (
                event.request_id == request_id
                and isinstance(event, OutputChunk | OutputFence)
                and seq < end_seq
            ):
                chunks += transcript.fold(event)
        return transcript, chunks

    def deaths_under(self, request_id: str) -> list[Life]:
        """The incarnations that died while they had a part of the request to do."""
        return [life for life in self.lives if life.died and request_id in self.under[life.incarnation]]

    def missed_by(self, request_id: str) -> set[int]:
        """The incarnations not known to have ended when a tensor of theirs was found lost."""
        ends = {life.incarnation: life.end_seq for life in self.lives}
        return {
            event.gone_life
            for seq, event in self.of_kind(WalkFailed, request_id)
            if event.gone_life is not None and seq < (ends.get(event.gone_life) or seq + 1)
        }

    def _look_under(self) -> None:
        """Find the requests that had a part to do, and an order for it, when each incarnation ended."""
        ends = {life.end_seq: life for life in self.lives}
        cluster = Cluster(self.sim.model.graph_of, SUBJECTS)
        for record in for_conductors(self.sim):
            if (life := ends.get(record.seq)) is not None:
                at_it = {one.id for one in cluster.open.values() if _is_at(one, life)}
                self.under[life.incarnation] = at_it
            cluster.fold(record)
            self.blamed.update(cluster.blamed.values())


def _is_at(request: Request, life: Life) -> bool:
    """True if an incarnation had a part of a request to do, and may have begun it."""
    return any(
        step.incarnations.get(life.rank) == life.incarnation
        and life.rank not in step.parts
        and life.rank in (step.begun if step.is_quarantined else step.stored)
        for step in request.running
    )


def _lives(sim: Simulation, valid: list[tuple[int, AnyEvent]]) -> Iterator[Life]:
    known: set[str] = set()
    present: dict[int, tuple[int, str]] = {}

    def over(rank: int, seq: int | None, end: str | None) -> Life:
        incarnation, joined_id = present.pop(rank)
        killer, killed_seq = sim.killed.get(joined_id, (None, 0))
        if seq is not None and killed_seq >= seq:
            killer = None  # it was given up before
        return Life(rank, incarnation, seq, end, killer)

    for seq, event in valid:
        if isinstance(event, WorkerJoined):
            if event.id in known:
                continue
            known.add(event.id)
            if event.rank in present:
                yield over(event.rank, seq, "WorkerJoined")
            present[event.rank] = (seq, event.id)
        elif isinstance(event, WorkerLeaving | WorkerLost) and _is_of(event, present):
            yield over(event.rank, seq, type(event).__name__)
    for rank in list(present):
        yield over(rank, None, None)


def _is_of(event: WorkerLeaving | WorkerLost, present: dict[int, tuple[int, str]]) -> bool:
    return event.rank in present and present[event.rank][0] == event.incarnation


# ---- folds ---------------------------------------------------------------------------------------


def for_conductors(sim: Simulation) -> list[StoredRecord]:
    """The records that a conductor reads."""
    log = sim.log
    return [one for one, at in zip(log.records, log.addresses, strict=True) if is_for_conductors(at)]


def fold(sim: Simulation) -> Iterator[tuple[Cluster, StoredRecord, Folded]]:
    """Fold the log as a conductor does, record by record."""
    cluster = Cluster(sim.model.graph_of, SUBJECTS)
    for record in for_conductors(sim):
        yield cluster, record, cluster.fold(record)


def state(cluster: Cluster) -> dict[str, Any]:
    """The whole state of a cluster, except its caches."""
    names = [one.name for one in fields(Cluster) if one.name not in snapshot.CACHES]
    return {name: getattr(cluster, name) for name in names}


def unstamped(event: Event) -> Event:
    """A conductor's event without the fields that differ between copies."""
    return msgspec.structs.replace(event, number=0, epoch=None)
