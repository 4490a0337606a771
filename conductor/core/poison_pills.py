"""Suspected poison pills: suspicion against requests under which a worker died, and its removal (ADR 9).

A worker may have died of any request that had an unfinished step there which may have begun: each of them is
a suspect. A suspect is resumed in quarantine (`on_probation` in the events), one per rank at a time: on an
empty rank if there is one, or together with former suspects that are proven harmless, while no other request
starts there. If no such rank exists, it runs together with others.

New output proves a suspect harmless: each sub-plan that was running when a worker died must get further than
it was. (A completed step is progress and resets the count of attempts, but the step after it may be the one
that kills.) A suspect is also cleared when another request is found to have ended the incarnation.

A worker that dies while only the suspect runs on it was killed by the suspect. If other requests ran there
too, that is uncertain: the next time, the suspect waits until a rank is empty.

The same record counts the attempts of requests that were never suspects (`Suspicion.tries`).

Pure functions of one request. `schedule` guarantees that a suspect is alone, and records it with
`request.resumed`.
"""

from typing import Final

import msgspec

from conductor.core.request import Request, Running, Suspicion

CLEARED: Final = Suspicion()
PROVEN: Final = Suspicion(proven=True)


def uses_up_attempt(request: Request, rank: int, incarnation: int, read_seq: int | None) -> bool:
    """Tell whether the end of an incarnation, which had read up to `read_seq`, uses up an attempt.

    The first death uses up an attempt of each request that ran there. A later one does so only for a request
    that ran alone, because it proves nothing about suspects that ran together. If the incarnation lost a
    tensor before (`after_loss`), that used up the attempt already.
    """
    suspicion = request.suspicion
    is_conclusive = not suspicion.dead_incarnations or rank in suspicion.alone_on
    return (
        is_conclusive
        and incarnation not in suspicion.tensor_losses
        and _may_have_caused(request, rank, incarnation, read_seq)
    )


def exhausted(request: Request) -> bool:
    """Tell whether the request has no attempts left."""
    return request.suspicion.tries >= request.limits.max_attempts


def after_death(request: Request, rank: int, incarnation: int, read_seq: int | None) -> Suspicion:
    """The suspicion against a request that was interrupted by a death."""
    suspicion = request.suspicion
    if not _may_have_caused(request, rank, incarnation, read_seq):
        return after_leaving(request)
    return Suspicion(
        tries=suspicion.tries + uses_up_attempt(request, rank, incarnation, read_seq),
        dead_incarnations=suspicion.dead_incarnations | {rank: incarnation},
        required_progress=_raised_requirement(suspicion.required_progress, request.running),
        in_doubt=suspicion.in_doubt or (bool(suspicion.dead_incarnations) and rank not in suspicion.alone_on),
        tensor_losses=suspicion.tensor_losses,
    )


def after_leaving(request: Request) -> Suspicion:
    """The suspicion against a request that was interrupted by an orderly leave of a worker."""
    return msgspec.structs.replace(request.suspicion, closed=frozenset(), alone_on=frozenset())


def after_loss(request: Request, incarnation: int | None) -> Suspicion:
    """The suspicion after a restart because a tensor of a running incarnation is gone: one attempt."""
    suspicion = request.suspicion
    return msgspec.structs.replace(
        suspicion,
        tries=suspicion.tries + 1,
        required_progress=_raised_requirement(suspicion.required_progress, request.running),
        tensor_losses=suspicion.tensor_losses
        if incarnation is None
        else suspicion.tensor_losses | {incarnation},
    )


def may_be_over(request: Request, incarnation: int | None) -> bool:
    """Tell whether a tensor may be gone because its incarnation is over, which the log does not say yet.

    Where several ranks die at once, those that are back first miss the tensors of the others. So the first
    loss of an incarnation does not end a request, for as many incarnations as it has ranks.
    """
    losses = request.suspicion.tensor_losses
    return incarnation is not None and incarnation not in losses and len(losses) < len(request.ranks)


def after_step(request: Request, step: Running) -> Suspicion:
    """The suspicion that remains after a completed step."""
    suspicion = request.suspicion
    if not _passes(suspicion, step):
        return suspicion
    if not suspicion.dead_incarnations:
        return _without(suspicion, step)
    return msgspec.structs.replace(
        suspicion,
        tries=1,
        required_progress=suspicion.required_progress | {step.partition: step.position + 1},
    )


def after_progress(request: Request, step: Running) -> Suspicion:
    """The suspicion that remains after a step has emitted new output."""
    suspicion = request.suspicion
    return _without(suspicion, step) if _passes(suspicion, step) else suspicion


def _passes(suspicion: Suspicion, step: Running) -> bool:
    return step.position >= suspicion.required_progress.get(step.partition, step.position + 1)


def _without(suspicion: Suspicion, step: Running) -> Suspicion:
    required = {
        name: position for name, position in suspicion.required_progress.items() if name != step.partition
    }
    return msgspec.structs.replace(suspicion, required_progress=required) if required else PROVEN


def _may_have_caused(request: Request, rank: int, incarnation: int, read_seq: int | None) -> bool:
    """Tell whether this request may have ended an incarnation: an unfinished step may have begun there.

    For a quarantined request, the worker reports that a step begins (`WalkBegun`). For others, the worker's
    log position shows whether it had read the order.
    """
    return any(
        step.incarnations.get(rank) == incarnation
        and rank not in step.parts
        and rank in step.stored
        and (rank in step.begun if step.is_quarantined else read_seq is None or step.stored[rank] <= read_seq)
        for step in request.running
    )


def _raised_requirement(required: dict[str, int], running: tuple[Running, ...]) -> dict[str, int]:
    """The progress to exceed: the old requirement, or the running steps if they are further."""
    reached = {step.partition: step.position for step in running}
    return required | {name: max(position, required.get(name, 0)) for name, position in reached.items()}
