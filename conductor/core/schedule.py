"""`schedule`: what depends on the world: whom to let in, and where a request's nodes run.

Pure, but not a function of one request's log: so its result is *recorded as a fact*, with its reason,
and counts from its position in the log on. A replay takes it as it is.

Of a group of nodes with several ranks, which are replicas, a request gets one: the one where another
group has put a node of it already, whose keys and values then need not move; else the one with the fewest
open requests. Only ranks that are there are given; each group must have one.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

import msgspec

from conductor.core.request import Request, World, ranks_of
from shared.errors import ModelNotFoundError
from shared.events import Failure, Limits, Pins, RequestAdmitted, RequestRejected
from shared.placement import PlacedGroup, assign


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What the conductor serves, as far as deciding needs it.

    Attributes:
        groups: where nodes may run; every node has a home in every walk.
        kv_nodes: the nodes that keep keys and values.
    """

    model: str
    family: str
    groups: tuple[PlacedGroup, ...]
    kv_nodes: frozenset[str]
    limits: Limits
    max_concurrent_requests: int
    graph_digest: str
    plan_digest: str
    config_digest: str
    core_digest: str


def schedule(
    waiting: Iterable[Request],
    admitted: Collection[RequestAdmitted],
    world: World,
    deployment: Deployment,
) -> list[RequestAdmitted]:
    """Whom of `waiting` (in order of submission) to admit now, with `admitted` open already."""
    free = deployment.max_concurrent_requests - len(admitted)
    if free <= 0 or not all(_there(group, world) for group in deployment.groups):
        return []
    load = Counter(rank for admission in admitted for rank in ranks_of(admission))
    found: list[RequestAdmitted] = []
    for request in islice(waiting, free):
        place = len(admitted) + len(found) + 1
        admission = _admit(request, place, load, world, deployment)
        load.update(ranks_of(admission))
        found.append(admission)
    return found


def refuse(request: Request, deployment: Deployment) -> RequestRejected | None:
    """The rejection of a request nobody here can ever serve; None for one that may wait."""
    if request.submission.model == deployment.model:
        return None
    error = ModelNotFoundError(request.submission.model, deployment.model)
    return RequestRejected(
        id=f"{request.id}.rejected.{request.submission_seq}",
        request_id=request.id,
        failure=Failure(code=error.code, message=error.message, status=error.status),
        submission_seq=request.submission_seq,
        trace=request.submission.trace,
    )


def _admit(
    request: Request, place: int, load: Mapping[int, int], world: World, deployment: Deployment
) -> RequestAdmitted:
    params = request.submission.params
    chosen, why = _choose(deployment.groups, load, world)
    placement, walk_placement = assign(deployment.groups, chosen)
    there = "every rank is there" if not why else "; ".join(why)
    return RequestAdmitted(
        id=f"{request.id}.admitted",
        request_id=request.id,
        attempt=1,
        family=deployment.family,
        seed=params.seed if params.seed is not None else derived_seed(request.id),
        placement=placement,
        walk_placement=walk_placement,
        limits=_limits(chosen, world, deployment),
        pins=Pins(
            graph=deployment.graph_digest,
            plan=deployment.plan_digest,
            config=deployment.config_digest,
            core=deployment.core_digest,
            submission=request.digest,
        ),
        reason=f"{there}; takes place {place} of {deployment.max_concurrent_requests}",
        trace=request.submission.trace,
    )


def _choose(
    groups: tuple[PlacedGroup, ...], load: Mapping[int, int], world: World
) -> tuple[list[int], list[str]]:
    """A rank of each group, and why that one, where there was a choice."""
    chosen: dict[int, int] = {n: group.ranks[0] for n, group in enumerate(groups) if len(group.ranks) == 1}
    why: list[str] = []
    for number, group in enumerate(groups):
        if number in chosen:
            continue
        ranks = _there(group, world)
        near = [
            chosen[other]
            for other in sorted(chosen)
            if chosen[other] in ranks and set(groups[other].nodes) & set(group.nodes)
        ]
        rank = near[0] if near else min(ranks, key=lambda one: (load.get(one, 0), one))
        nodes = " and ".join(group.nodes) + (f" in {' and '.join(group.walks)}" if group.walks else "")
        what = (
            "it is there in other walks" if near else f"the least loaded, {load.get(rank, 0)} requests open"
        )
        why.append(f"{nodes} on rank {rank} of {ranks}: {what}")
        chosen[number] = rank
    return [chosen[number] for number in range(len(groups))], why


def _there(group: PlacedGroup, world: World) -> list[int]:
    """The group's ranks that are there now."""
    return [rank for rank in sorted(group.ranks) if world.incarnation(rank) is not None]


def _limits(chosen: list[int], world: World, deployment: Deployment) -> Limits:
    """The deployment's limits, or the KV pool of a rank the request is given, where that is smaller."""
    ranks = {
        rank
        for group, rank in zip(deployment.groups, chosen, strict=True)
        if deployment.kv_nodes & set(group.nodes)
    }
    pools = [world.ranks[rank].kv_tokens for rank in ranks]
    kv_tokens = min([deployment.limits.kv_tokens, *(tokens for tokens in pools if tokens)])
    return msgspec.structs.replace(deployment.limits, kv_tokens=kv_tokens)


def derived_seed(request_id: str) -> int:
    """The seed of a request that names none: a digest of its id, so that every reader knows it."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "big")
