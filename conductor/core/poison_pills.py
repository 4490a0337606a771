"""Who killed the worker? What is held against a request, and what clears it (ADR 9).

All that ran on a rank when its life ended are suspects. A suspect is resumed on probation, one at a time on
each rank: on an empty one where there is one, or with those that were suspects and are proven, and nothing
else begins there meanwhile; where no rank is that quiet, beside others. What proves it is output that is new:
each sub-plan that was under way when a worker died is further than it was. (A step that is done is progress,
and begins the count of tries again; but the step behind it may be the one that kills.) A suspect also is
cleared when a life is found to have ended by another.

A worker that dies while nothing at all is beside a suspect died of it. If others were beside it, that is in
doubt, for they may kill, too: the next time it waits until a rank is empty.

Pure functions of one request; that a suspect is alone is `schedule`'s promise, recorded with
`request.resumed`.
"""

from typing import Final

import msgspec

from conductor.core.request import Request, Running, Suspicion

CLEARED: Final = Suspicion()
PROVEN: Final = Suspicion(proven=True)


def counts(request: Request, rank: int, life: int, read_seq: int | None) -> bool:
    """Whether the end of a rank's life, which had read so far, uses up a try of this request.

    The first one does, for each that ran there. A later one only where it ran alone: it says nothing of a
    suspect that had company. And one of which a tensor was gone before has done so already.
    """
    held = request.suspicion
    is_its_own = not held.lives or rank in held.alone_on
    return is_its_own and life not in held.missed and _was_there(request, rank, life, read_seq)


def exhausted(request: Request) -> bool:
    """Whether it may not be tried once more."""
    return request.suspicion.tries >= request.limits.max_attempts


def after_death(request: Request, rank: int, life: int, read_seq: int | None) -> Suspicion:
    """What is held against a request that is interrupted by a death."""
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
    """What is held against a request that is interrupted by a worker's leaving in order."""
    return msgspec.structs.replace(request.suspicion, closed=frozenset(), alone_on=frozenset())


def after_loss(request: Request, life: int | None) -> Suspicion:
    """What is held against one that begins again because a tensor of a life that runs is gone: a try."""
    held = request.suspicion
    return msgspec.structs.replace(
        held,
        tries=held.tries + 1,
        hurdles=_raised(held.hurdles, request.running),
        missed=held.missed if life is None else held.missed | {life},
    )


def after_step(request: Request, step: Running) -> Suspicion:
    """What is left once a step is done."""
    held = request.suspicion
    if not _passes(held, step):
        return held
    if not held.lives:
        return _without(held, step)
    return msgspec.structs.replace(held, tries=1, hurdles=held.hurdles | {step.partition: step.position + 1})


def after_progress(request: Request, step: Running) -> Suspicion:
    """What is left once a step has put out what is new."""
    held = request.suspicion
    return _without(held, step) if _passes(held, step) else held


def _passes(held: Suspicion, step: Running) -> bool:
    return step.position >= held.hurdles.get(step.partition, step.position + 1)


def _without(held: Suspicion, step: Running) -> Suspicion:
    hurdles = {name: position for name, position in held.hurdles.items() if name != step.partition}
    return msgspec.structs.replace(held, hurdles=hurdles) if hurdles else PROVEN


def _was_there(request: Request, rank: int, life: int, read_seq: int | None) -> bool:
    """Whether a life may have ended by this request: it may have begun what is not done.

    What is on probation says so when it begins; of the rest it is known whether an order was to be read.
    """
    return any(
        step.lives.get(rank) == life
        and rank not in step.parts
        and rank in step.stored
        and (rank in step.begun if step.on_probation else read_seq is None or step.stored[rank] <= read_seq)
        for step in request.running
    )


def _raised(hurdles: dict[str, int], running: tuple[Running, ...]) -> dict[str, int]:
    """The hurdles, and where the steps under way stand, whichever is further."""
    reached = {step.partition: step.position for step in running}
    return hurdles | {name: max(position, hurdles.get(name, 0)) for name, position in reached.items()}
