"""Scheduling, decided again over a whole log and given its past. Pure.

The log is folded as its conductors folded it. After each record `cluster.schedule` is called as the leader
called it, and its decisions are held against the recorded ones. Then the *recorded* decisions are applied,
whatever was decided here: so each decision is compared for the same past, and one difference does not cause
others.

A recorded decision is expected within its window (`dalsegno.gate.recorded_decisions`). What is decided here
and was never stored is a difference only if the log proves that the conductor lived on: one that died, or was
deposed, decides nothing more, and its successor decides again.

Facts that are no decisions are taken from the log: time limits that passed, lost workers, leadership.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, TypeAlias

import msgspec

from conductor.core.affinity import pieces
from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import plain
from conductor.core.replicas import Memory
from conductor.core.request import Decision, World
from conductor.core.schedule import Deployment, place_of
from dalsegno.gate.differences import DECISION, ERROR, ORDER, WHEN, Difference, between
from dalsegno.gate.recorded_decisions import Epoch, Fold, Made, RecordedDecisions, Scheduled
from dalsegno.history.event_description import type_of
from models.base import ModelGraph
from shared.events import EpochOpened, RequestAdmitted, RequestRejected, RequestResumed
from shared.log.port import StoredRecord
from shared.subjects import Subjects

AS_RECORDED: Final = "as recorded"
SCHEDULER: Final = "scheduler"
"""The event of an exception, which belongs to no single request."""
EARLIER: Final = "earlier"
LATER: Final = "later or never"


class Redecided(msgspec.Struct, kw_only=True):
    """The result.

    Attributes:
        decided: by request, the number of its recorded decisions that were decided again.
        unproven: decisions that are made here and of which the log does not tell whether they were made.
        skipped: by request, the reason why its recorded decisions were not decided again.
    """

    decided: dict[str, int] = {}
    differences: list[Difference] = []
    unproven: int = 0
    skipped: dict[str, str] = {}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A difference, and both decisions.

    Attributes:
        made: the recorded decision; None if there is none.
        found: the decision that is made here; None if there is none yet.
        deployment: that of `found`.
    """

    difference: Difference
    made: Made | None
    found: Scheduled | None
    deployment: Deployment


Watch: TypeAlias = Callable[[Told, Cluster], None]
"""Called with each difference, in the state of the cluster in which it is found."""


def decide_again(
    records: Sequence[StoredRecord],
    recorded: RecordedDecisions,
    deployments: Mapping[int, Deployment | str],
    *,
    subjects: Subjects,
    graph_of: Callable[[str], ModelGraph],
    cluster: "TaughtCluster | None" = None,
    watch: Watch | None = None,
) -> Redecided:
    """Decide scheduling again.

    Args:
        records: those that a conductor reads, from the beginning of the log.
        recorded: the decisions in them.
        deployments: by epoch, its deployment; or the reason why it is not known.
        subjects: those of the log.
        graph_of: the graph of a family, by name.
        cluster: the cluster that decides, if it is of a special kind.
        watch: sees the differences as they are found.
    """
    run = _Run(cluster or TaughtCluster(graph_of, subjects), recorded, deployments, watch)
    for record in records:
        run.take(record)
    return run.close()


class TaughtCluster(Cluster):
    """A cluster to which decisions can be applied that it did not make, and that takes back its own."""

    def teach(self, event: Scheduled, deployment: Deployment) -> None:
        """Apply a recorded decision that was not made here."""
        request = self.waiting.pop(str(event.request_id), None) or self.held.pop(str(event.request_id), None)
        if request is None or isinstance(event, RequestRejected):
            return
        self._places[request.id] = place_of(event, request)
        if isinstance(event, RequestAdmitted):
            self.memory.admission_counts[request.tenant] += 1
        self._remember(event, deployment, 1)

    def correct(self, event: Scheduled, deployment: Deployment) -> None:
        """Apply a recorded decision instead of the one that was made here about the same request."""
        request = self.open.get(str(event.request_id))
        if request is None or isinstance(event, RequestRejected):
            return
        if request.id in self._places and request.phase in {Phase.WAITING, Phase.HELD}:
            self._places[request.id] = place_of(event, request)
            self._remember(event, deployment, 0)

    def take_back(self, event: Scheduled, deployment: Deployment) -> None:
        """Undo a decision that was made here: the request waits again.

        A refused one does not: it cannot be admitted by this deployment.
        """
        request = self.open.get(str(event.request_id))
        if request is None or isinstance(event, RequestRejected):
            return
        self._places.pop(request.id, None)
        if isinstance(event, RequestAdmitted):
            self.memory.admission_counts[request.tenant] -= 1
            ids = {*self.waiting, request.id}
            self.waiting = {one.id: one for one in self.open.values() if one.id in ids}
        else:
            ids = {*self.held, request.id}
            self.held = {one.id: one for one in self.open.values() if one.id in ids}
        self._remember(event, deployment, -1)

    def _remember(self, event: RequestAdmitted | RequestResumed, deployment: Deployment, turns: int) -> None:
        """Update the memory of the choice of replicas as if a decision had, or had not, been made here."""
        request = self.open[str(event.request_id)]
        for group in deployment.groups:
            if len(group.ranks) == 1:
                continue
            self.memory.turns[group.ranks] += turns
            if deployment.replicas == "cache_aware" and turns >= 0:
                rank = event.placement[group.nodes[0]]
                for walk in group.walks or ():
                    rank = event.walk_placement.get(walk, {}).get(group.nodes[0], rank)
                self.memory.affinity.note(rank, pieces(request.submission.inputs))


@dataclass(slots=True)
class _Run:
    """One pass over the log."""

    cluster: TaughtCluster
    recorded: RecordedDecisions
    deployments: Mapping[int, Deployment | str]
    watch: Watch | None = None
    result: Redecided = field(default_factory=Redecided)
    _fold: Fold = field(init=False)
    _memories: dict[str, Memory] = field(default_factory=dict)
    _epoch: Epoch | None = None
    _expected: dict[str, Made] = field(default_factory=dict)
    _last_number: int = 0
    _told: set[tuple[str, str]] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._fold = Fold(self.cluster)

    def take(self, record: StoredRecord) -> None:
        """Fold one record and decide."""
        self._apply_overdue(record.seq)
        before = self.cluster.world
        event, decisions, opens = self._fold.read(record)
        self._forget_ends(before)
        if isinstance(event, EpochOpened) and opens:
            self._lead(event)
            decisions = tuple(self.cluster.outstanding())
        deployment = self._deployment()
        if self._epoch is None or deployment is None:
            return
        refusals = [one for one in decisions if isinstance(one, RequestRejected)]
        for decision in (*refusals, *self._schedule(deployment, record)):
            if isinstance(decision, Scheduled):
                self._hold(decision, record.seq, self._epoch, deployment)

    def _schedule(self, deployment: Deployment, record: StoredRecord) -> list[Decision]:
        """Decide; an exception is a difference, told once for each kind."""
        try:
            return self.cluster.schedule(deployment)
        except Exception as error:  # noqa: BLE001 - the code that is examined may do anything
            found = f"{type(error).__name__}: {error}"
            if (found, ERROR) not in self._told:
                self._told.add((found, ERROR))
                address = self.cluster.subjects.parse(record.subject)
                self.result.differences.append(
                    Difference(
                        level="schedule",
                        event=SCHEDULER,
                        field=ERROR,
                        recorded=None,
                        found=found,
                        request_id=str(address.request_id if address is not None else ""),
                        seq=record.seq,
                    )
                )
            return []

    def close(self) -> Redecided:
        """End the log."""
        self._apply_overdue(inf)
        return self.result

    def _lead(self, event: EpochOpened) -> None:
        """Begin an epoch: a conductor keeps its memory as long as its process lives."""
        self._epoch = self.recorded.epochs[self.cluster.fence.epoch]
        self._expected = dict(self._epoch.made)
        self._last_number = 0
        self.cluster.memory = self._memories.setdefault(event.conductor, Memory())

    def _forget_ends(self, before: World) -> None:
        """Forget the prefixes of ended incarnations in the memory of every conductor."""
        after = self.cluster.world
        if after is before:
            return
        for rank in before.ranks:
            incarnation = before.incarnation(rank)
            if incarnation is not None and after.incarnation(rank) != incarnation:
                for memory in self._memories.values():
                    memory.affinity.forget(rank)

    def _deployment(self) -> Deployment | None:
        if self._epoch is None:
            return None
        found = self.deployments[self._epoch.epoch]
        return None if isinstance(found, str) else found

    # ---- comparison --------------------------------------------------------------------------------
    def _hold(self, decision: Scheduled, seq: int, epoch: Epoch, deployment: Deployment) -> None:
        """Hold one decision that is made here against the recorded ones."""
        made = self._expected.get(decision.id)
        if made is None:
            self._hold_unrecorded(decision, seq, epoch, deployment)
        elif seq < made.earliest:
            self._tell(decision, WHEN, AS_RECORDED, EARLIER, seq, made)
            self.cluster.take_back(decision, deployment)
        else:
            del self._expected[decision.id]
            self._count(made)
            if made.number and made.number < self._last_number:
                self._tell(decision, ORDER, AS_RECORDED, "after a decision that followed it", made.seq, made)
            self._last_number = max(self._last_number, made.number)
            for name, was, becomes in differing(made.event, decision):
                self._tell(decision, name, was, becomes, made.seq, made)
            self.cluster.correct(made.event, deployment)

    def _hold_unrecorded(self, decision: Scheduled, seq: int, epoch: Epoch, deployment: Deployment) -> None:
        if not epoch.has_decided_after(seq) or epoch.has_lost_events(seq):
            self.result.unproven += 1
            return
        if isinstance(decision, RequestRejected):
            self._refused.add(str(decision.request_id))
        self._tell(decision, DECISION, None, _named(decision), seq)
        self.cluster.take_back(decision, deployment)

    def _apply_overdue(self, seq: float) -> None:
        """Apply the recorded decisions that were made before the record at `seq`, and not here."""
        overdue = [one for one in self._expected.values() if one.latest < seq]
        deployment = self._deployment()
        for made in sorted(overdue, key=lambda one: (one.number, one.seq)):
            del self._expected[made.event.id]
            if deployment is None:
                assert self._epoch is not None
                self.result.skipped[str(made.event.request_id)] = str(self.deployments[self._epoch.epoch])
                continue
            self._count(made)
            self._last_number = max(self._last_number, made.number)
            if str(made.event.request_id) not in self._refused:
                field_name, was, becomes = (DECISION, _named(made.event), None)
                if not isinstance(made.event, RequestRejected):
                    field_name, was, becomes = (WHEN, AS_RECORDED, LATER)
                self._tell(made.event, field_name, was, becomes, made.seq, made)
            self.cluster.teach(made.event, deployment)

    def _count(self, made: Made) -> None:
        request_id = str(made.event.request_id)
        self.result.decided[request_id] = self.result.decided.get(request_id, 0) + 1

    def _tell(
        self, decision: Scheduled, name: str, was: Any, becomes: Any, seq: int, made: Made | None = None
    ) -> None:
        """Note a difference; the same one of a decision only once."""
        if (decision.id, name) in self._told:
            return
        self._told.add((decision.id, name))
        difference = Difference(
            level="schedule",
            event=type_of(decision),
            field=name,
            recorded=was,
            found=becomes,
            request_id=str(decision.request_id),
            seq=seq,
        )
        self.result.differences.append(difference)
        deployment = self._deployment()
        if self.watch is not None and deployment is not None:
            found = None if made is not None and decision is made.event else decision
            self.watch(
                Told(difference=difference, made=made, found=found, deployment=deployment), self.cluster
            )


def _named(decision: Scheduled) -> str:
    """A decision in one word; a refusal by its code."""
    return decision.failure.code if isinstance(decision, RequestRejected) else type_of(decision)


def differing(recorded: Scheduled, found: Scheduled) -> list[tuple[str, Any, Any]]:
    """The leaves in which two decisions of `schedule` differ: field, recorded and found value."""
    found = _as_there(recorded, found)
    if recorded == found:
        return []
    return list(between(plain(recorded), plain(found)))


def _as_there(recorded: Scheduled, found: Scheduled) -> Scheduled:
    """A decision as it would be where the other one was made: with its writer, its log, and its code.

    The digests of code and configuration are named by the report, and decide nothing. The log's limit for an
    event is that of its server. Older versions did not record all fields; these are not compared.
    """
    changes: dict[str, Any] = {
        "writer": recorded.writer,
        "number": recorded.number,
        "epoch": recorded.epoch,
    }
    if isinstance(recorded, RequestAdmitted | RequestResumed) and isinstance(found, type(recorded)):
        changes |= {
            name: getattr(recorded, name)
            for name in ("lives", "weights", "revisions")
            if not recorded.lives or (name != "lives" and not recorded.weights)
        }
    if isinstance(recorded, RequestAdmitted) and isinstance(found, RequestAdmitted):
        was = recorded.limits
        unknown = {name: 0 for name in ("concurrent", "max_concurrent") if not getattr(was, name)}
        changes["limits"] = msgspec.structs.replace(
            found.limits, max_event_bytes=was.max_event_bytes, **unknown
        )
        changes["pins"] = msgspec.structs.replace(recorded.pins, submission=found.pins.submission)
    return msgspec.structs.replace(found, **changes)
