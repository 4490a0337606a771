"""Suspected poison pills: which requests are suspected of killing a worker, and what clears them (ADR 9).

Every request that ran on a rank when its incarnation ended is a suspect. A suspect is resumed in
quarantine, one per rank at a time: on an empty rank if there is one, or together with former suspects that
are proven harmless, while no other request starts there; if no rank is quiet enough, together with others.
New output proves a suspect
harmless: each sub-plan that was running when a worker died must get further than it was. (A completed step is
progress and resets the count of attempts, but the step after it may be the one that kills.) A suspect is also
cleared when another request turns out to have ended the incarnation.

A worker that dies while only the suspect runs on it was killed by the suspect. If other requests ran there
too, that is uncertain: the next time, the suspect waits until a rank is empty.

Pure functions of one request. `schedule` guarantees that a suspect is alone, and records it with
`request.resumed`.
"""

from typing import Final

import msgspec

from conductor.core.request import Request, Running, Suspicion

CLEARED: Final = Suspicion()
PROVEN: Final = Suspicion(proven=True)


def counts(request: Request, rank: int, life: int, read_seq: int | None) -> bool:
    """Tell whether the end of an incarnation, which had read up to `read_seq`, uses up an attempt.

    The first one does for each request that ran there. A later one does only for a request that ran alone: it
    says nothing about suspects that had company. An incarnation from which a tensor was lost has used one up
    already.
    """
    held = request.suspicion
    is_its_own = not held.lives or rank in held.alone_on
    return is_its_own and life not in held.missed and _was_there(request, rank, life, read_seq)


def exhausted(request: Request) -> bool:
    """Tell whether the request has no attempts left."""
    return request.suspicion.tries >= request.limits.max_attempts


def after_death(request: Request, rank: int, life: int, read_seq: int | None) -> Suspicion:
    """The suspicion against a request that was interrupted by a death."""
    held = request.suspicion
    if not _was_there(request, rank, life, read_seq):
        return after_leaving(request)
    return Suspicion(
        tries=held.tries + counts(request, rank, life, read_seq),
        lives=held.lives | {rank: life},
        hurdles=_raised(held.hurdles, request.running),
        in_doubt=held.in_doubt or (bool(held.lives) and rank not in held.alone_on),
        missed=held.missed,
    )


def after_leaving(request: Request) -> Suspicion:
    """The suspicion against a request that was interrupted by an orderly leave of a worker."""
    return msgspec.structs.replace(request.suspicion, closed=frozenset(), alone_on=frozenset())


def after_loss(request: Request, life: int | None) -> Suspicion:
    """The suspicion after a restart because a tensor of a running incarnation is gone: one attempt."""
    held = request.suspicion
    return msgspec.structs.replace(
        held,
        tries=held.tries + 1,
        hurdles=_raised(held.hurdles, request.running),
        missed=held.missed if life is None else held.missed | {life},
    )


def after_step(request: Request, step: Running) -> Suspicion:
    """The suspicion that remains after a completed step."""
    held = request.suspicion
    if not _passes(held, step):
        return held
    if not held.lives:
        return _without(held, step)
    return msgspec.structs.replace(held, tries=1, hurdles=held.hurdles | {step.partition: step.position + 1})


def after_progress(request: Request, step: Running) -> Suspicion:
    """The suspicion that remains after a step has emitted new output."""
    held = request.suspicion
    return _without(held, step) if _passes(held, step) else held


def _passes(held: Suspicion, step: Running) -> bool:
    return step.position >= held.hurdles.get(step.partition, step.position + 1)


def _without(held: Suspicion, step: Running) -> Suspicion:
    hurdles = {name: position for name, position in held.hurdles.items() if name != step.partition}
    return msgspec.structs.replace(held, hurdles=hurdles) if hurdles else PROVEN


def _was_there(request: Request, rank: int, life: int, read_seq: int | None) -> bool:
    """Tell whether this request may have ended an incarnation: an unfinished step may have begun there.

    Quarantined requests report their begin; for others it is known whether the order had been read.
    """
    return any(
        step.lives.get(rank) == life
        and rank not in step.parts
        and rank in step.stored
        and (rank in step.begun if step.on_probation else read_seq is None or step.stored[rank] <= read_seq)
        for step in request.running
    )


def _raised(hurdles: dict[str, int], running: tuple[Running, ...]) -> dict[str, int]:
    """The progress to exceed: the old marks, or the running steps if they are further."""
    reached = {step.partition: step.position for step in running}
    return hurdles | {name: max(position, hurdles.get(name, 0)) for name, position in reached.items()}
