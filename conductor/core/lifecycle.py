"""The life of a request as a table: `phase x event -> phase`.

One dictionary says what may happen; the diagram in `docs/lifecycle.md` is drawn from it, so the picture
cannot drift from the table. A missing key has one of two meanings, and both are visible branches in
`conductor.core.react`: for a *fact* it means "too late, or not for this phase": it is kept in the log and
changes nothing; for a *decision* it means that somebody decided what cannot be decided here.
"""

from enum import StrEnum
from typing import Final

from shared.events import (
    DeadlinePassed,
    Event,
    NodeReady,
    OutputFence,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)


class Phase(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Submitted, not admitted yet."""
    RUNNING = "running"
    """Admitted; a step of its plan is dispatched."""
    HELD = "held"
    """Admitted, and interrupted: a rank it was placed on is gone. It waits for `schedule` to resume it."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"

    @property
    def ended(self) -> bool:
        return self not in {Phase.WAITING, Phase.RUNNING, Phase.HELD}


FACTS: Final[dict[Phase, frozenset[type[Event]]]] = {
    Phase.WAITING: frozenset({RequestCancel, DeadlinePassed}),
    Phase.RUNNING: frozenset(
        {
            RequestCancel,
            DeadlinePassed,
            WalkBegun,
            WalkCompleted,
            WalkFailed,
            WalkProgressed,
            WorkerJoined,
            WorkerLeaving,
            WorkerLost,
        }
    ),
    Phase.HELD: frozenset({RequestCancel, DeadlinePassed}),
}
"""Which facts count in which phase. A fact by itself moves nothing: the decisions it leads to do."""

DECISIONS: Final[dict[Phase, dict[type[Event], Phase]]] = {
    Phase.WAITING: {
        RequestAdmitted: Phase.RUNNING,
        RequestRejected: Phase.REJECTED,
        RequestCancelled: Phase.CANCELLED,
        RequestFailed: Phase.FAILED,
    },
    Phase.RUNNING: {
        NodeReady: Phase.RUNNING,
        WalkStop: Phase.RUNNING,
        OutputFence: Phase.HELD,
        RequestFinished: Phase.FINISHED,
        RequestFailed: Phase.FAILED,
        RequestCancelled: Phase.CANCELLED,
    },
    Phase.HELD: {
        NodeReady: Phase.RUNNING,
        WalkStop: Phase.HELD,
        RequestResumed: Phase.RUNNING,
        RequestFinished: Phase.FINISHED,
        RequestFailed: Phase.FAILED,
        RequestCancelled: Phase.CANCELLED,
    },
}
"""Where each decision leads."""


def diagram() -> str:
    """The life of a request as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> waiting: RequestSubmitted"]
    for phase, moves in DECISIONS.items():
        lines += [f"    {phase} --> {to}: {decision.__name__}" for decision, to in moves.items()]
    lines += [f"    {phase} --> [*]" for phase in Phase if phase.ended]
    return "\n".join(lines)
