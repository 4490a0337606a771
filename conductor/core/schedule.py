"""`schedule`: decisions that depend on all requests and ranks: admission, resumption, choice of ranks.

Pure, but not a function of one request's log. Its results are therefore *recorded as facts* with their
reasons, and count from their position in the log; a replay takes them as they are.

Waiting requests are admitted by `priority`, then by the earliest deadline, then by the tenant with the
fewest open requests or the fewest admissions, then in order of submission (`conductor.core.queue`).
`conductor.core.replicas` chooses the replica. Above a limit, submissions are rejected instead of waiting.

Held requests are resumed before others are admitted. A suspected poison pill
(`conductor.core.poison_pills`) is tried on the quietest rank, one per rank at a time: on an empty rank, or
with proven requests only, while no other request starts there; otherwise together with others, because no
request waits while a replica is available. The latest submission comes first: a request that kills a worker
mostly does so at once.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from conductor.core import queue, weights
from conductor.core.replicas import Memory, Place, Policy, Ranks
from conductor.core.request import Request, World, ranks_of
from configs.placement import PlacedGroup, assign
from models import options
from models.base import ModelGraph
from shared.adapters import Adapter, adapter_name, addressed
from shared.errors import ClientError, ModelNotFoundError
from shared.events import Failure, Limits, Pins, RequestAdmitted, RequestRejected, RequestResumed
from shared.media.request_check import check_media
from shared.request_texts import check_texts
from shared.subjects import worker_writer

_TOO_MANY: Final = 429


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment, as far as decisions depend on it.

    Attributes:
        groups: the possible placements; every node has a group in every walk.
        kv_nodes: the nodes that keep keys and values.
        replicas: policy for the choice between ranks; `max_per_replica` limits the requests of a rank.
        max_waiting: maximum of waiting requests; None is no limit.
        shorten_above: share of `max_concurrent_requests` in use above which a request is admitted with
            `shorten_to` of its tokens.
        adapters: the LoRA adapters of the configuration, by name; with `takes_adapters`, there may be others.
    """

    model: str
    family: str
    groups: tuple[PlacedGroup, ...]
    kv_nodes: frozenset[str]
    limits: Limits
    max_concurrent_requests: int
    replicas: Policy = "fsfs"
    max_per_replica: int | None = None
    max_waiting: int | None = None
    shorten_above: float | None = None
    shorten_to: float = 0.8
    adapters: dict[str, Adapter] = {}
    takes_adapters: bool = False
    graph_digest: str
    plan_digest: str
    config_digest: str
    core_digest: str


def schedule(
    waiting: Collection[Request],
    held: Collection[Request],
    places: Collection[Place],
    world: World,
    deployment: Deployment,
    *,
    blamed: Mapping[int, str] | None = None,
    memory: Memory | None = None,
) -> list[RequestAdmitted | RequestResumed]:
    """Choose the requests of `held` to resume, and of `waiting` (in order of submission) to admit now.

    `places` are the placements of requests that are admitted and not held. `blamed` has the incarnations
    that a single request is known to have ended: no other request is a suspect. `memory` is the state of
    earlier calls; without it, the choice of replicas is slightly worse for a while.
    """
    open_requests = len(places) + len(held)
    free = max(0, deployment.max_concurrent_requests - open_requests)
    if not held and not free:
        return []
    memory = memory or Memory()
    ranks = Ranks(
        deployment.groups, world, policy=deployment.replicas, most=deployment.max_per_replica, memory=memory
    )
    for place in places:
        ranks.occupy(place)
    resumed = _resume(held, ranks, blamed or {})
    admitted: list[RequestAdmitted] = []
    open_of = Counter([*(place.tenant for place in places), *(one.tenant for one in held)])
    memory.admission_counts = queue.normalized_admission_counts(
        memory.admission_counts, {*open_of, *(request.tenant for request in waiting)}
    )
    for request in queue.in_admission_order(waiting, open_of, memory.admission_counts):
        options = [ranks.available_in(group) for group in deployment.groups]
        if len(admitted) == free or not all(options):
            break
        admission = _admit(request, open_requests + len(admitted) + 1, options, ranks, deployment)
        ranks.occupy(place_of(admission, request))
        open_of[request.tenant] += 1
        memory.admission_counts[request.tenant] += 1
        admitted.append(admission)
    return [*resumed, *admitted]


def place_of(event: RequestAdmitted | RequestResumed, request: Request) -> Place:
    """The place that a decision assigns."""
    return Place(
        ranks=ranks_of(event.placement, event.walk_placement),
        closed=frozenset(event.closed if isinstance(event, RequestResumed) else ()),
        is_quarantined=isinstance(event, RequestResumed) and event.on_probation,
        tenant=request.tenant,
    )


def rejection(request: Request, deployment: Deployment, graph: ModelGraph) -> RequestRejected | None:
    """The rejection of a request that can never be served here; None if it may wait.

    `graph` is that of the deployment's family: its options, the modalities it takes, and whether
    it takes several texts.
    """
    submission = request.submission
    try:
        adapter_of(request, deployment)
        options.check(graph.options, submission.params.options)
        check_media(submission.inputs, graph.modalities)
        check_texts(
            submission.inputs,
            submission.params,
            takes_texts=graph.takes_texts,
            truncates=graph.truncates(submission.inputs),
        )
    except ClientError as refused:
        error = refused
    else:
        return None
    return _rejected(request, Failure(code=error.code, message=error.message, status=error.status))


def adapter_of(request: Request, deployment: Deployment) -> Adapter | None:
    """The LoRA adapter that a request names; None if it names the plain model.

    Raises:
        ModelNotFoundError: it names another model, or an adapter that there was not when it was submitted.
    """
    model = request.submission.model
    if model == deployment.model:
        return None
    name = adapter_name(model)
    found = deployment.adapters.get(name, request.loaded if deployment.takes_adapters else None)
    if found is None or model != addressed(deployment.model, name):
        raise ModelNotFoundError(model, deployment.model)
    return found


def reject_overflow(request: Request, deployment: Deployment) -> RequestRejected:
    """The rejection of a request because too many are waiting."""
    message = (
        f"{deployment.max_concurrent_requests} requests are running and {deployment.max_waiting} are waiting "
        "(scheduling.max_waiting): try again later"
    )
    return _rejected(request, Failure(code="queue_full", message=message, status=_TOO_MANY))


def _rejected(request: Request, failure: Failure) -> RequestRejected:
    return RequestRejected(
        id=f"{request.id}.rejected.{request.submission_seq}",
        request_id=request.id,
        failure=failure,
        submission_seq=request.submission_seq,
        trace=request.submission.trace,
    )


def _resume(held: Collection[Request], ranks: Ranks, blamed: Mapping[int, str]) -> list[RequestResumed]:
    suspects = {request.id: died for request in held if (died := _suspected_on(request, blamed))}
    last_first = sorted(
        (request for request in held if request.id in suspects),
        key=lambda request: (-request.submission_seq, request.id),
    )
    others = [request for request in held if request.id not in suspects]
    found: list[RequestResumed] = []
    for request in (*last_first, *others):
        decision = _resumption(request, suspects.get(request.id, frozenset()), ranks)
        if decision is not None:
            ranks.occupy(place_of(decision, request))
            found.append(decision)
    return found


def _suspected_on(request: Request, blamed: Mapping[int, str]) -> frozenset[int]:
    """The ranks whose deaths a request is suspected of."""
    dead = request.suspicion.dead_incarnations
    return frozenset(rank for rank, one in dead.items() if blamed.get(one, request.id) == request.id)


def _resumption(request: Request, died: frozenset[int], ranks: Ranks) -> RequestResumed | None:
    """Place a held request that ran when the ranks in `died` ended; None while no place is free."""
    options: list[list[int]] = []
    for group in ranks.groups:
        there = weights.same_weights(ranks.open_in(group), group, request.weights, ranks.world)
        there = _large_enough(there, request, ranks.world)
        if died & set(group.ranks):
            there = _quarantine_options(there, ranks, alone=request.suspicion.in_doubt)
        options.append(there)
    if not all(options):
        return None
    chosen, why = ranks.choose(weights.consistent(options, ranks.groups, ranks.world), request)
    placement, walk_placement = assign(ranks.groups, chosen)
    quarantine = {rank for group, rank in zip(ranks.groups, chosen, strict=True) if died & set(group.ranks)}
    closed = sorted(rank for rank in quarantine if not ranks.unproven[rank])
    alone_on = sorted(rank for rank in quarantine if not ranks.load[rank])
    reason = "; ".join(why) or "no choice of ranks"
    if quarantine:
        where = " and ".join(str(rank) for rank in sorted(quarantine))
        company = "with proven requests only" if len(closed) == len(quarantine) else "as the only suspect"
        company = "alone" if len(alone_on) == len(quarantine) else company
        reason = f"{company} on rank {where}, because a worker died while it ran; {reason}"
    return RequestResumed(
        id=f"{request.id}.resumed.{request.resumptions}",
        request_id=request.id,
        attempt=request.attempt,
        index=request.resumptions,
        placement=placement,
        walk_placement=walk_placement,
        lives=_lives(placement, walk_placement, ranks.world),
        weights=weights.of_placement(placement, walk_placement, ranks.world),
        revisions=weights.revisions_of(placement, walk_placement, ranks.world),
        on_probation=bool(died),
        closed=closed,
        alone_on=alone_on,
        reason=f"resumed: {reason}",
        trace=request.submission.trace,
    )


def _quarantine_options(there: list[int], ranks: Ranks, *, alone: bool) -> list[int]:
    """Ranks for a suspect: empty ones, then those with proven requests, then those without another suspect.

    A request that must run `alone` waits for an empty rank; one is emptied for it if newcomers can go
    elsewhere.
    """
    calm = [rank for rank in there if rank not in ranks.quarantine_ranks]
    empty = [rank for rank in calm if not ranks.load[rank]]
    if alone:
        if not empty and len(there) > 1:
            ranks.closed.add(min(calm or there, key=lambda rank: (ranks.load[rank], rank)))
        return empty
    return empty or [rank for rank in calm if not ranks.unproven[rank]] or calm


def _large_enough(ranks: list[int], request: Request, world: World) -> list[int]:
    """The ranks whose KV cache is as large as promised at admission; all ranks if none is."""
    pools = {rank: world.ranks[rank].kv_tokens for rank in ranks}
    return [rank for rank in ranks if not 0 < pools[rank] < request.limits.kv_tokens] or ranks


def _admit(
    request: Request, place: int, options: list[list[int]], ranks: Ranks, deployment: Deployment
) -> RequestAdmitted:
    params = request.submission.params
    chosen, why = ranks.choose(weights.consistent(options, ranks.groups, ranks.world), request)
    placement, walk_placement = assign(deployment.groups, chosen)
    there = "no choice of ranks" if not why else "; ".join(why)
    return RequestAdmitted(
        id=f"{request.id}.admitted",
        request_id=request.id,
        attempt=1,
        family=deployment.family,
        seed=params.seed if params.seed is not None else derived_seed(request.id),
        placement=placement,
        walk_placement=walk_placement,
        lives=_lives(placement, walk_placement, ranks.world),
        weights=weights.of_placement(placement, walk_placement, ranks.world),
        revisions=weights.revisions_of(placement, walk_placement, ranks.world),
        adapter=adapter_of(request, deployment),
        limits=_limits(chosen, ranks.world, deployment, taken=place - 1),
        pins=Pins(
            graph=deployment.graph_digest,
            plan=deployment.plan_digest,
            config=deployment.config_digest,
            core=deployment.core_digest,
            submission=request.digest,
        ),
        reason=f"{there}; concurrent request {place} of {deployment.max_concurrent_requests}",
        trace=request.submission.trace,
    )


def _lives(
    placement: dict[str, int], walk_placement: dict[str, dict[str, int]], world: World
) -> dict[str, int]:
    """The present incarnation of each rank of a placement, by writer."""
    ranks = sorted(ranks_of(placement, walk_placement))
    return {
        worker_writer(rank): incarnation
        for rank in ranks
        if (incarnation := world.incarnation(rank)) is not None
    }


def _limits(chosen: list[int], world: World, deployment: Deployment, *, taken: int) -> Limits:
    """The deployment's limits, reduced to the KV cache of the assigned rank if that is smaller."""
    ranks = {
        rank
        for group, rank in zip(deployment.groups, chosen, strict=True)
        if deployment.kv_nodes & set(group.nodes)
    }
    pools = [world.ranks[rank].kv_tokens for rank in ranks]
    kv_tokens = min([deployment.limits.kv_tokens, *(tokens for tokens in pools if tokens)])
    above = deployment.shorten_above
    is_busy = above is not None and taken > above * deployment.max_concurrent_requests
    share = deployment.shorten_to if is_busy else 1.0
    return msgspec.structs.replace(
        deployment.limits,
        kv_tokens=kv_tokens,
        max_tokens_share=share,
        concurrent=taken + 1,
        max_concurrent=deployment.max_concurrent_requests,
    )


def derived_seed(request_id: str) -> int:
    """The seed of a request without one: derived from its id, so that every reader computes the same."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "big")
