"""Scheduling, decided again for single requests: bundles, which hold no other request. Pure.

The order of admissions, the choice of ranks and a full queue depend on the other requests, so these are taken
as recorded. Given them, the rest of a decision is decided again by `schedule` itself: whether the request is
refused, with which code and message; seed, limits, adapter, weights and incarnations of an admission or a
resumption.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.replicas import Place
from conductor.core.request import Request, World
from conductor.core.schedule import Deployment, reject_overflow, rejection, schedule
from configs.placement import PlacedGroup, assign
from dalsegno.gate.differences import DECISION, Difference
from dalsegno.gate.recorded_decisions import Epoch, Fold, Made, RecordedDecisions, Scheduled
from dalsegno.gate.scheduling import Redecided, differing
from dalsegno.history.event_description import type_of
from models.base import ModelGraph
from shared.events import RequestAdmitted, RequestRejected, RequestResumed
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import Subjects

_OTHERS: Final = Place(ranks=frozenset())
"""The place of another request, on ranks that are not looked at."""
_OF_ALL: Final = "; concurrent request"
"""The part of an admission's reason from here on does not depend on the ranks."""


def decide_again(
    records: Sequence[StoredRecord],
    recorded: RecordedDecisions,
    deployment_of: Callable[[str], Deployment | str],
    *,
    subjects: Subjects,
    graph_of: Callable[[str], ModelGraph],
) -> Redecided:
    """Decide again what does not depend on other requests.

    Args:
        records: those of a bundle that a conductor reads.
        recorded: the decisions in them.
        deployment_of: the deployment of a configuration's digest, or the reason why it is not known.
        subjects: those of the log.
        graph_of: the graph of a family, by name.
    """
    run = _Run(Cluster(graph_of, subjects), recorded, deployment_of, graph_of)
    for record in records:
        run.take(record)
    return run.result


class _Run:
    """One pass over the records of a bundle."""

    def __init__(
        self,
        cluster: Cluster,
        recorded: RecordedDecisions,
        deployment_of: Callable[[str], Deployment | str],
        graph_of: Callable[[str], ModelGraph],
    ) -> None:
        self.result = Redecided()
        self._fold = Fold(cluster)
        self._made: dict[int, tuple[Epoch, Made]] = {
            made.seq: (epoch, made) for epoch in recorded.epochs.values() for made in epoch.made.values()
        }
        self._refusals: dict[str, RequestRejected] = {}
        self._deployment_of = deployment_of
        self._graph_of = graph_of
        self._configs: dict[str, str] = {}

    def take(self, record: StoredRecord) -> None:
        """Decide a recorded decision again in the state before it; then fold the record."""
        found = self._made.get(record.seq)
        if found is not None:
            self._hold(found[1])
        _, decisions, _ = self._fold.read(record)
        self._refusals |= {one.id: one for one in decisions if isinstance(one, RequestRejected)}

    def _hold(self, made: Made) -> None:
        request_id = str(made.event.request_id)
        refusal = self._refusals.get(made.event.id)
        again = refusal if refusal is not None else self._decided(made.event)
        if isinstance(again, str):
            self.result.skipped[request_id] = again
            return
        self.result.decided[request_id] = self.result.decided.get(request_id, 0) + 1
        if again is None or type(again) is not type(made.event):
            leaves = [(DECISION, _named(made.event), None if again is None else _named(again))]
        else:
            leaves = differing(made.event, again)
        for name, was, becomes in leaves:
            self.result.differences.append(
                Difference(
                    level="schedule",
                    event=type_of(made.event),
                    field=name,
                    recorded=was,
                    found=becomes,
                    request_id=request_id,
                    seq=made.seq,
                )
            )

    def _decided(self, event: Scheduled) -> Scheduled | str | None:
        """The decision now; None if there is none; or the reason why it cannot be decided again."""
        request = self._fold.cluster.open.get(str(event.request_id))
        if request is None:
            return "it had ended when it was decided"
        if isinstance(event, RequestAdmitted):
            self._configs[request.id] = event.pins.config
        deployment = self._deployment_of(self._configs.get(request.id, ""))
        if isinstance(deployment, str):
            return deployment
        family = request.admitted.family if request.admitted is not None else deployment.family
        if isinstance(event, RequestAdmitted):
            family = event.family
        if family != deployment.family:
            return f"the configuration serves the family {deployment.family}, not {family}"
        if isinstance(event, RequestResumed):
            return _resumed(request, event, self._fold.cluster.world, deployment)
        refused = rejection(request, deployment, self._graph_of(deployment.family))
        if isinstance(event, RequestRejected):
            return refused or reject_overflow(request, deployment)
        return refused or _admitted(request, event, self._fold.cluster.world, deployment)


def _named(decision: Scheduled) -> str:
    return decision.failure.code if isinstance(decision, RequestRejected) else type_of(decision)


def _admitted(
    request: Request, event: RequestAdmitted, world: World, deployment: Deployment
) -> RequestAdmitted | str | None:
    narrow = _narrowed(deployment, event)
    if isinstance(narrow, str):
        return narrow
    others = [_OTHERS] * max(0, event.limits.concurrent - 1)
    decisions = schedule([request], [], others, _as_of(world, event), narrow)
    found = next((one for one in decisions if isinstance(one, RequestAdmitted)), None)
    if found is None:
        return None
    there, marker, _ = event.reason.partition(_OF_ALL)
    rest = found.reason.partition(_OF_ALL)[2]
    # Older versions worded all of it otherwise.
    return msgspec.structs.replace(found, reason=f"{there}{marker}{rest}" if marker else event.reason)


def _resumed(
    request: Request, event: RequestResumed, world: World, deployment: Deployment
) -> RequestResumed | str | None:
    narrow = _narrowed(deployment, event)
    if isinstance(narrow, str):
        return narrow
    decisions = schedule([], [request], [], _as_of(world, event), narrow)
    found = next((one for one in decisions if isinstance(one, RequestResumed)), None)
    if found is None:
        return None
    # Suspicion and quarantine depend on what else ran.
    of_others: dict[str, Any] = {
        name: getattr(event, name) for name in ("on_probation", "closed", "alone_on", "reason")
    }
    return msgspec.structs.replace(found, **of_others)


def _narrowed(deployment: Deployment, event: RequestAdmitted | RequestResumed) -> Deployment | str:
    """The deployment with the recorded ranks alone, and without a limit of requests per rank."""
    chosen: list[int] = []
    for group in deployment.groups:
        rank = event.placement.get(group.nodes[0])
        for walk in group.walks or ():
            rank = event.walk_placement.get(walk, {}).get(group.nodes[0], rank)
        if rank is None or rank not in group.ranks:
            return f"the configuration does not place {' and '.join(group.nodes)} on rank {rank}"
        chosen.append(rank)
    if assign(deployment.groups, chosen) != (event.placement, event.walk_placement):
        return "the configuration has other groups of nodes"
    groups = tuple(
        PlacedGroup(nodes=group.nodes, walks=group.walks, ranks=(Rank(rank),))
        for group, rank in zip(deployment.groups, chosen, strict=True)
    )
    return msgspec.structs.replace(deployment, groups=groups, max_per_replica=None)


def _as_of(world: World, event: RequestAdmitted | RequestResumed) -> World:
    """The world in which the recorded incarnations live, if the log knew them already.

    Between the decision and its record a rank may have left or come again. Its memory and its weights are
    then those of the last incarnation.
    """
    ranks = dict(world.ranks)
    for writer, incarnation in event.lives.items():
        rank = Rank(int(writer.removeprefix("w")))
        if rank in ranks and ranks[rank].incarnation != incarnation:
            ranks[rank] = msgspec.structs.replace(ranks[rank], incarnation=incarnation)
    return World(ranks=ranks)
