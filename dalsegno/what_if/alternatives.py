"""The alternatives of a recorded admission or resumption: each rank, and why it was or was not taken. Pure.

The log is decided again up to the decision (`dalsegno.gate.scheduling`), so that everything that the
scheduler looked at is what it was: the requests of each rank, the known prefixes, the queue. Where the
installed code chooses otherwise than the record says, the answer tells both.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from conductor.core import queue, weights
from conductor.core.affinity import pieces
from conductor.core.replicas import Memory, Place, Ranks
from conductor.core.request import Decision, Request
from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup
from dalsegno.gate.recorded_decisions import RecordedDecisions, for_conductor, index
from dalsegno.gate.scheduling import TaughtCluster, decide_again
from models import registry
from shared.events import RequestAdmitted, RequestResumed
from shared.log.port import StoredRecord
from shared.subjects import Subjects

Taken: TypeAlias = RequestAdmitted | RequestResumed
EpochsOf: TypeAlias = Callable[[RecordedDecisions], Mapping[int, Deployment | str]]
Verdict: TypeAlias = Literal["chosen", "possible", "full", "closed", "absent", "other weights"]

_LISTED: Final = 50
"""Waiting requests that are listed."""


class WeighedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a group, as the scheduler saw it.

    Attributes:
        open_requests: those that were placed there.
        cached: the leading pieces of the prompt that it was known to have computed.
        verdict: `chosen` in the record, `possible`, or what ruled it out.
        decided: the installed code chooses it.
    """

    rank: int
    open_requests: int
    cached: int
    verdict: Verdict
    decided: bool


class WeighedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a rank for some nodes, in some walks or (`walks` is empty) in all others."""

    nodes: list[str]
    walks: list[str]
    ranks: list[WeighedRank]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waited.

    Attributes:
        deadline_s: seconds to its deadline; None without one.
        tenant_open: the open requests of its tenant when its turn came.
    """

    request_id: str
    priority: int
    deadline_s: float | None
    tenant: str
    tenant_open: int


class Alternatives(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler chose from.

    Attributes:
        after_seq: the record after which it decided.
        reason: the recorded one.
        policy: between ranks that are possible.
        most_per_rank: the limit of open requests of a rank; None is no limit.
        pieces: the number of pieces of the prompt.
        open_requests: all that had a place, of at most `most`.
        queue: for an admission, the waiting requests in the order of their turns; the first ones.
        waiting: the number of all of them.
    """

    after_seq: int
    reason: str
    policy: str
    most_per_rank: int | None
    pieces: int
    open_requests: int
    most: int
    groups: list[WeighedGroup]
    queue: list[Waiting]
    waiting: int


def alternatives(
    records: Sequence[StoredRecord], epochs_of: EpochsOf, subjects: Subjects, seq: int
) -> Alternatives | str:
    """Return the alternatives of the decision at a position; or the reason why they are not known.

    Args:
        records: the log, from its beginning to that position or further.
        epochs_of: returns by epoch its deployment, or why it is not known (`Deployments.of_epochs`).
        subjects: those of the log.
        seq: the position of an admission or a resumption.
    """
    past = [one for one in records if one.seq <= seq and for_conductor(one.subject, subjects)]
    recorded = index(past, subjects, registry.graph)
    decisions = [one for epoch in recorded.epochs.values() for one in epoch.made.values()]
    made = next((one for one in decisions if one.seq == seq), None)
    if made is None or not isinstance(made.event, Taken):
        return f"record {seq} is no admission and no resumption: no ranks were chosen there"
    epochs = epochs_of(recorded)
    if isinstance(unknown := epochs[made.epoch], str):
        return unknown
    cluster = _WeighingCluster(registry.graph, subjects)
    cluster.wanted = made.event
    decide_again(past, recorded, epochs, subjects=subjects, graph_of=registry.graph, cluster=cluster)
    return (
        cluster.found or "the installed code does not make this decision; `dalsegno gate` says what it does"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What `schedule` starts from."""

    places: list[Place]
    memory: Memory
    turns: list[Waiting]
    waiting: int
    held: int


class _WeighingCluster(TaughtCluster):
    """A cluster that notes what it chose from when it makes one decision."""

    wanted: Taken
    found: Alternatives | None = None

    def schedule(self, deployment: Deployment) -> list[Decision]:
        request = self.open.get(str(self.wanted.request_id))
        if request is None or (request.id not in self.waiting and request.id not in self.held):
            return super().schedule(deployment)
        before = self._before(deployment)
        decisions = super().schedule(deployment)
        ranks = Ranks(
            deployment.groups,
            self.world,
            policy=deployment.replicas,
            most=deployment.max_per_replica,
            memory=before.memory,
        )
        for place in before.places:
            ranks.occupy(place)
        for count, decision in enumerate(one for one in decisions if isinstance(one, Taken)):
            if decision.id == self.wanted.id:
                self.found = self._weighed(decision, request, before, ranks, deployment, count)
                break
            self._take(decision, ranks)
        return decisions

    def _take(self, decision: Taken, ranks: Ranks) -> None:
        """Give a request its ranks, as `schedule` does before it looks at the next one."""
        request_id = str(decision.request_id)
        ranks.occupy(self._places[request_id])
        if ranks.policy != "cache_aware":
            return
        names = pieces(self.open[request_id].submission.inputs)
        for group in ranks.groups:
            rank = _rank_in(decision, group)
            if len(group.ranks) > 1 and rank is not None:
                ranks.memory.affinity.note(rank, names)

    def _before(self, deployment: Deployment) -> _Before:
        return _Before(
            places=list(self._places.values()),
            memory=copy.deepcopy(self.memory) if deployment.replicas == "cache_aware" else Memory(),
            turns=self._turns(),
            waiting=len(self.waiting),
            held=len(self.held),
        )

    def _turns(self) -> list[Waiting]:
        """The waiting requests in the order of their turns."""
        open_of = Counter(
            [*(one.tenant for one in self._places.values()), *(one.tenant for one in self.held.values())]
        )
        counts = queue.normalized_admission_counts(
            self.memory.admission_counts, {*open_of, *(one.tenant for one in self.waiting.values())}
        )
        found: list[Waiting] = []
        for one in queue.in_admission_order(self.waiting.values(), open_of, counts):
            if len(found) == _LISTED:
                break
            deadline_ns = one.deadline_ns
            found.append(
                Waiting(
                    request_id=one.id,
                    priority=one.submission.priority,
                    deadline_s=None if deadline_ns is None else (deadline_ns - self.now_ns) / 1e9,
                    tenant=one.tenant,
                    tenant_open=open_of[one.tenant],
                )
            )
            open_of[one.tenant] += 1
            counts[one.tenant] += 1
        return found

    def _weighed(
        self,
        decided: Taken,
        request: Request,
        before: _Before,
        ranks: Ranks,
        deployment: Deployment,
        count: int,
    ) -> Alternatives:
        names = pieces(request.submission.inputs)
        is_admission = isinstance(self.wanted, RequestAdmitted)
        return Alternatives(
            after_seq=self.seq,
            reason=self.wanted.reason,
            policy=deployment.replicas,
            most_per_rank=deployment.max_per_replica,
            pieces=len(names),
            open_requests=len(before.places) + (before.held + count if is_admission else count),
            most=deployment.max_concurrent_requests,
            groups=[
                WeighedGroup(
                    nodes=list(group.nodes),
                    walks=list(group.walks or ()),
                    ranks=[
                        WeighedRank(
                            rank=rank,
                            open_requests=ranks.load[rank],
                            cached=before.memory.affinity.has(rank, names),
                            verdict=self._verdict(rank, group, request, ranks),
                            decided=rank == _rank_in(decided, group),
                        )
                        for rank in sorted(group.ranks)
                    ],
                )
                for group in deployment.groups
            ],
            queue=before.turns if is_admission else [],
            waiting=before.waiting,
        )

    def _verdict(self, rank: int, group: PlacedGroup, request: Request, ranks: Ranks) -> Verdict:
        if rank == _rank_in(self.wanted, group):
            return "chosen"
        if self.world.incarnation(rank) is None:
            return "absent"
        if rank in ranks.closed:
            return "closed"
        if isinstance(self.wanted, RequestAdmitted):
            return "possible" if rank in ranks.available_in(group) else "full"
        same = weights.same_weights(ranks.open_in(group), group, request.weights, self.world)
        return "possible" if rank in same else "other weights"


def _rank_in(decision: Taken, group: PlacedGroup) -> int | None:
    """The rank that a decision gives the nodes of a group."""
    node = group.nodes[0]
    if group.walks is None:
        return decision.placement.get(node)
    return decision.walk_placement.get(group.walks[0], {}).get(node, decision.placement.get(node))
