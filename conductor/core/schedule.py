"""`schedule`: what depends on the world: whom to let in, and where a request's nodes run.

Pure, but not a function of one request's log: so its result is *recorded as a fact*, with its reason,
and counts from its position in the log on. A replay takes it as it is.
"""

import hashlib
from collections.abc import Iterable
from itertools import islice

import msgspec

from conductor.core.request import Request, World
from shared.errors import ModelNotFoundError
from shared.events import Failure, Limits, Pins, RequestAdmitted, RequestRejected


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What the conductor serves, as far as deciding needs it."""

    model: str
    family: str
    placement: dict[str, int]
    limits: Limits
    max_concurrent_requests: int
    graph_digest: str
    plan_digest: str
    config_digest: str
    core_digest: str


def schedule(
    waiting: Iterable[Request], running: int, world: World, deployment: Deployment
) -> list[RequestAdmitted]:
    """Whom of `waiting` (in order of submission) to admit now, with `running` admitted before."""
    if any(world.incarnation(rank) is None for rank in deployment.placement.values()):
        return []
    free = max(0, deployment.max_concurrent_requests - running)
    return [
        _admit(request, running + number, world, deployment)
        for number, request in enumerate(islice(waiting, free), start=1)
    ]


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


def _admit(request: Request, running: int, world: World, deployment: Deployment) -> RequestAdmitted:
    params = request.submission.params
    return RequestAdmitted(
        id=f"{request.id}.admitted",
        request_id=request.id,
        attempt=1,
        family=deployment.family,
        seed=params.seed if params.seed is not None else derived_seed(request.id),
        placement=deployment.placement,
        limits=_limits(world, deployment),
        pins=Pins(
            graph=deployment.graph_digest,
            plan=deployment.plan_digest,
            config=deployment.config_digest,
            core=deployment.core_digest,
            submission=request.digest,
        ),
        reason=f"every rank is there; takes place {running} of {deployment.max_concurrent_requests}",
        trace=request.submission.trace,
    )


def _limits(world: World, deployment: Deployment) -> Limits:
    """The deployment's limits, or a rank's own KV pool where that is smaller."""
    pools = [world.ranks[rank].kv_tokens for rank in set(deployment.placement.values())]
    kv_tokens = min([deployment.limits.kv_tokens, *(tokens for tokens in pools if tokens)])
    return msgspec.structs.replace(deployment.limits, kv_tokens=kv_tokens)


def derived_seed(request_id: str) -> int:
    """The seed of a request that names none: a digest of its id, so that every reader knows it."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "big")
