"""Decisions of another configuration, given the recorded past. Pure.

The log is decided again twice (`dalsegno.gate.scheduling`): with the recorded configuration, and with the
other one. What already differs with the recorded one is no effect of the change, and is left out. After each
record the recorded decisions are applied, whatever the other configuration decides: each decision is exact
for the recorded past, and says nothing about what would have followed from it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal, TypeAlias

import msgspec

from conductor.core import queue
from conductor.core.cluster import Cluster
from conductor.core.replicas import Memory, Ranks
from conductor.core.request import Decision, Request, World
from conductor.core.schedule import Deployment
from dalsegno.gate.differences import DECISION, ORDER, WHEN
from dalsegno.gate.recorded_decisions import RecordedDecisions, Scheduled
from dalsegno.gate.scheduling import EARLIER, Redecided, TaughtCluster, Told, decide_again
from dalsegno.history.event_description import type_of
from models.base import ModelGraph
from shared.events import (
    AnyEvent,
    MalformedEventError,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    WorkerJoined,
    decode,
)
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import Subjects

Kind: TypeAlias = Literal["later", "earlier", "elsewhere", "refused", "not_refused", "admitted", "changed"]
KINDS: Final[tuple[Kind, ...]] = (
    "later", "earlier", "elsewhere", "refused", "not_refused", "admitted", "changed"
)  # fmt: skip

_FOLLOWING: Final = ("reason", "pins", "lives", "weights", "revisions")
"""Fields that only restate the configuration, or follow from the ranks."""
_NUMBERS: Final = frozenset(
    {"limits.concurrent", "limits.max_concurrent", "failure.message", "failure.status"}
)
"""Fields that count the other requests, or name the limit."""
_ENDS: Final = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision about a request that another configuration makes otherwise.

    Attributes:
        event: the type of the decision.
        seq: the position of the recorded decision, or of the record after which it is made now.
        recorded, found: what differs.
        why: the reason that the other configuration gives.
        behind: of a request that waits: the requests that have the places.
        ahead: those that wait and come before it.
        seconds: how much earlier, or how much later at least, given the recorded ends of those; None if
            they do not end in the log.
    """

    request_id: str
    kind: Kind
    event: str
    seq: int
    recorded: Any = None
    found: Any = None
    why: str = ""
    behind: list[str] = []
    ahead: list[str] = []
    seconds: float | None = None


class Otherwise(msgspec.Struct, kw_only=True):
    """The result.

    Attributes:
        decided: the number of recorded decisions that were decided again.
        unlike: the requests whose decisions differ with the recorded configuration already.
        skipped: by request, the reason why it was not decided again.
        unproven: decisions made with the other configuration of which the log does not tell whether a
            conductor lived to make them.
        added_ranks: ranks that the log does not have, with the recorded rank whose state each is given.
    """

    decided: int = 0
    changes: list[Change] = []
    unlike: list[str] = []
    skipped: dict[str, str] = {}
    unproven: int = 0
    added_ranks: dict[int, int] = {}


def decide_otherwise(
    records: Sequence[StoredRecord],
    recorded: RecordedDecisions,
    before: Mapping[int, Deployment | str],
    after: Mapping[int, Deployment | str],
    *,
    subjects: Subjects,
    graph_of: Callable[[str], ModelGraph],
    kv_tokens: int | None = None,
) -> Otherwise:
    """Decide a log again with other deployments.

    Args:
        records: those that a conductor reads, from the beginning of the log.
        recorded: the decisions in them.
        before: by epoch, the recorded deployment; or why it is not known.
        after: by epoch, the other deployment.
        subjects: those of the log.
        graph_of: the graph of a family, by name.
        kv_tokens: the other size of each rank's KV cache; None if it is the recorded one.
    """
    same = decide_again(records, recorded, before, subjects=subjects, graph_of=graph_of)
    known = {(one.request_id, one.event, one.field) for one in same.differences}
    added = _added_ranks(records, subjects, after)
    cluster = _OtherCluster(graph_of, subjects)
    cluster.added, cluster.kv_tokens = added, kv_tokens
    run = _Collector(_Times(records, subjects), known)
    other = decide_again(
        records, recorded, after, subjects=subjects, graph_of=graph_of, cluster=cluster, watch=run.take
    )
    return Otherwise(
        decided=sum(other.decided.values()),
        changes=list(run.changes()),
        unlike=_unlike(same),
        skipped=other.skipped,
        unproven=other.unproven,
        added_ranks=added,
    )


def _added_ranks(
    records: Sequence[StoredRecord], subjects: Subjects, after: Mapping[int, Deployment | str]
) -> dict[int, int]:
    """The ranks of the other deployment that never join, each with a rank of its group that does."""
    joined = {
        event.rank for _, event in _events(records, subjects, {"worker"}) if isinstance(event, WorkerJoined)
    }
    groups = [group for one in after.values() if isinstance(one, Deployment) for group in one.groups]
    return {
        int(rank): int(like)
        for group in groups
        for rank in group.ranks
        if rank not in joined
        and (like := next((one for one in group.ranks if one in joined), None)) is not None
    }


def _events(
    records: Sequence[StoredRecord], subjects: Subjects, kinds: set[str]
) -> Iterator[tuple[StoredRecord, AnyEvent]]:
    for record in records:
        address = subjects.parse(record.subject)
        if address is None or address.kind not in kinds:
            continue
        try:
            yield record, decode(record.data, address.kind)
        except MalformedEventError:
            continue


# ---- the state in which a decision is made otherwise ---------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """The cause of a wait: the limit, the requests that have the places, and those that come before it.

    `free_after`: how many of all these have to end before there is a place for it; 0 if that is not known.
    """

    why: str
    behind: list[str]
    ahead: list[str]
    free_after: int = 0


class _OtherCluster(TaughtCluster):
    """A cluster that decides as if its ranks were those of the other configuration."""

    added: dict[int, int]
    kv_tokens: int | None

    def schedule(self, deployment: Deployment) -> list[Decision]:
        recorded = self.world
        self.world = self._other_world()
        try:
            return super().schedule(deployment)
        finally:
            self.world = recorded

    def _other_world(self) -> World:
        ranks = dict(self.world.ranks)
        for rank, like in self.added.items():
            if like in ranks:
                ranks[Rank(rank)] = ranks[Rank(like)]
        if self.kv_tokens is not None:
            sized = {
                r: msgspec.structs.replace(s, kv_tokens=self.kv_tokens)
                for r, s in ranks.items()
                if s.kv_tokens
            }
            ranks |= sized
        return World(ranks=ranks)

    def obstacle(self, request: Request, deployment: Deployment) -> _Obstacle:
        """Return the cause for which a request waits here, or is held."""
        running = [name for name in self._places if name != request.id]
        held = [name for name in self.held if name != request.id]
        is_waiting = request.id in self.waiting
        ahead = [*held, *self._before(request)] if is_waiting else []
        most = deployment.max_concurrent_requests
        taken = len(running) + len(held)
        if is_waiting and taken >= most:
            why = f"max_concurrent_requests is {most}, and {taken} ran"
            return _Obstacle(
                why=why, behind=running, ahead=ahead, free_after=len({*running, *ahead}) - most + 1
            )
        ranks = Ranks(
            deployment.groups,
            self._other_world(),
            policy=deployment.replicas,
            most=deployment.max_per_replica if is_waiting else None,
            memory=Memory(),
        )
        for name in running:
            ranks.occupy(self._places[name])
        for group in deployment.groups:
            if ranks.available_in(group):
                continue
            nodes = " and ".join(group.nodes)
            there = [name for name in running if self._places[name].ranks & set(group.ranks)]
            if not any(ranks.world.incarnation(rank) is not None for rank in group.ranks):
                return _Obstacle(why=f"no rank of {nodes} was there", behind=[], ahead=ahead)
            if not ranks.open_in(group):
                return _Obstacle(
                    why=f"the ranks of {nodes} were kept for a suspect", behind=there, ahead=ahead
                )
            why = f"each rank of {nodes} had {ranks.most} requests (scheduling.max_in_flight_per_replica)"
            return _Obstacle(why=why, behind=there, ahead=ahead)
        return _Obstacle(why="others came first", behind=running, ahead=ahead)

    def _before(self, request: Request) -> list[str]:
        """The waiting requests that are admitted before this one."""
        open_of = Counter(
            [*(one.tenant for one in self._places.values()), *(r.tenant for r in self.held.values())]
        )
        counts = queue.normalized_admission_counts(
            self.memory.admission_counts, {*open_of, *(one.tenant for one in self.waiting.values())}
        )
        found: list[str] = []
        for one in queue.in_admission_order(self.waiting.values(), open_of, counts):
            if one.id == request.id:
                break
            open_of[one.tenant] += 1
            counts[one.tenant] += 1
            found.append(one.id)
        return found


class _Times:
    """Times of records, and of the ends of requests."""

    def __init__(self, records: Sequence[StoredRecord], subjects: Subjects) -> None:
        self._of = {record.seq: record.time_ns for record in records}
        self._ends: dict[str, int] = {}
        for record, event in _events(records, subjects, {"walk"}):
            if isinstance(event, _ENDS):
                self._ends.setdefault(str(event.request_id), record.time_ns)

    def between_s(self, seq: int, later: int) -> float:
        return (self._of[later] - self._of[seq]) / 1e9

    def until_free_s(self, obstacle: _Obstacle, seq: int) -> float | None:
        """Seconds from the record at `seq` until enough of the requests in the way have ended."""
        if obstacle.free_after < 1:
            return None
        names = {*obstacle.behind, *obstacle.ahead}
        ends = sorted(float(self._ends.get(name, inf)) for name in names)
        end_ns = ends[obstacle.free_after - 1]
        return None if end_ns == inf else max(0.0, (end_ns - self._of[seq]) / 1e9)


# ---- changes -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Collector:
    """Turns differences into changes, as they are found."""

    times: _Times
    known: set[tuple[str, str, str]]
    _found: list[Change] = field(default_factory=list)

    def take(self, told: Told, cluster: Cluster) -> None:
        """Note a difference; the cluster is in the state in which the decision is made."""
        one = told.difference
        if (one.request_id, one.event, one.field) in self.known or one.field == ORDER:
            return
        assert isinstance(cluster, _OtherCluster)
        if one.field == WHEN:
            self._found.append(self._when(told, cluster))
        elif one.field == DECISION:
            self._found.append(self._decision(told, cluster))
        elif (kind := _kind_of(one.field)) is not None:
            change = self._change(told, kind, _why(told.found))
            self._found.append(
                msgspec.structs.replace(
                    change, recorded={one.field: one.recorded}, found={one.field: one.found}
                )
            )

    def changes(self) -> Iterator[Change]:
        """The changes by position; fields of one decision, and what is said twice, are merged."""
        merged: dict[tuple[str, str, Kind], Change] = {}
        for one in sorted(self._found, key=lambda one: one.seq):
            key = (one.request_id, one.event, one.kind)
            merged[key] = _merged(merged.get(key), one)
        admitted = {one.request_id: one for one in merged.values() if one.kind == "admitted"}
        kept = {one.request_id for one in merged.values() if one.kind == "not_refused"}
        for change in merged.values():
            instead = admitted.get(change.request_id)
            if change.kind == "not_refused" and instead is not None:
                yield msgspec.structs.replace(
                    change, found="admitted", why=instead.why, behind=[], ahead=[], seconds=None
                )
            elif change.kind != "admitted" or change.request_id not in kept:
                yield change

    def _when(self, told: Told, cluster: _OtherCluster) -> Change:
        one, made = told.difference, told.made
        assert made is not None
        if one.found == EARLIER:
            change = self._change(told, "earlier", _why(told.found))
            return msgspec.structs.replace(
                change, recorded=made.seq, found=one.seq, seconds=self.times.between_s(change.seq, made.seq)
            )
        change = self._change(told, "later", "")
        return self._waits(change, told, cluster, made.seq)

    def _decision(self, told: Told, cluster: _OtherCluster) -> Change:
        made, found = told.made, told.found
        if made is not None:
            change = self._change(told, "not_refused", "")
            change = msgspec.structs.replace(change, recorded=told.difference.recorded, found="waiting")
            return self._waits(change, told, cluster, made.seq)
        if isinstance(found, RequestRejected):
            change = self._change(told, "refused", found.failure.message)
            return msgspec.structs.replace(change, found=found.failure.code)
        return self._change(told, "admitted", _why(found))

    def _waits(self, change: Change, told: Told, cluster: _OtherCluster, seq: int) -> Change:
        request = cluster.open.get(change.request_id)
        if request is None:
            return change
        obstacle = cluster.obstacle(request, told.deployment)
        return msgspec.structs.replace(
            change,
            why=obstacle.why,
            behind=obstacle.behind,
            ahead=obstacle.ahead,
            seconds=self.times.until_free_s(obstacle, seq),
        )

    @staticmethod
    def _change(told: Told, kind: Kind, why: str) -> Change:
        one, decision = told.difference, told.found
        if decision is None:
            assert told.made is not None, "a difference has a decision"
            decision = told.made.event
        assert one.seq is not None, "it has a position"
        return Change(request_id=one.request_id, kind=kind, event=type_of(decision), seq=one.seq, why=why)


def _kind_of(name: str) -> Kind | None:
    head = name.partition(".")[0].partition("[")[0]
    if head in _FOLLOWING or name in _NUMBERS:
        return None
    if head in {"placement", "walk_placement"}:
        return "elsewhere"
    return "refused" if head == "failure" else "changed"


def _unlike(same: Redecided) -> list[str]:
    """The requests that the recorded configuration decides otherwise; another reason alone does not count."""
    whole = {DECISION, ORDER, WHEN}
    found = {one.request_id for one in same.differences if one.field in whole or _kind_of(one.field)}
    return sorted(found)


def _why(found: Scheduled | None) -> str:
    return found.reason if isinstance(found, RequestAdmitted | RequestResumed) else ""


# ---- bundles -------------------------------------------------------------------------------------------


def of_bundle(before: Redecided, after: Redecided) -> Otherwise:
    """The changes of a single request, decided again with both deployments (`dalsegno.gate.admission`)."""
    known = {(one.request_id, one.event, one.field) for one in before.differences}
    merged: dict[tuple[str, str, Kind], Change] = {}
    for one in after.differences:
        kind: Kind | None = "refused" if one.field == DECISION else _kind_of(one.field)
        if kind is None or (one.request_id, one.event, one.field) in known or one.seq is None:
            continue
        if one.field == DECISION and one.recorded is not None and one.event == "request.rejected":
            kind = "not_refused"
        plainly = one.field == DECISION
        change = Change(
            request_id=one.request_id,
            kind=kind,
            event=one.event,
            seq=one.seq,
            recorded=one.recorded if plainly else {one.field: one.recorded},
            found=one.found if plainly else {one.field: one.found},
        )
        key = (one.request_id, one.event, kind)
        merged[key] = _merged(merged.get(key), change)
    return Otherwise(
        decided=sum(after.decided.values()),
        changes=list(merged.values()),
        unlike=_unlike(before),
        skipped=after.skipped,
    )


def _merged(before: Change | None, one: Change) -> Change:
    """The fields of one decision as one change."""
    if before is None or not isinstance(before.found, dict):
        return one
    return msgspec.structs.replace(
        before, recorded=before.recorded | one.recorded, found=before.found | one.found
    )
