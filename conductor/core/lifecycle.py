"""The lifecycle of a request as a table: `phase x event -> phase`.

One dictionary defines the transitions; the diagram in `docs/lifecycle.md` is generated from it. A missing
key has one of two meanings, each a visible branch in `conductor.core.react`. For a *fact*: too late, or not
for this phase; the record is kept and changes nothing. For a *decision*: another conductor made a decision
that is impossible here.
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
    """The phase of a request."""

    WAITING = "waiting"
    """Submitted, not admitted yet."""
    RUNNING = "running"
    """Admitted; a step of its plan is dispatched."""
    HELD = "held"
    """Admitted and interrupted: one of its ranks is gone. It waits until `schedule` resumes it."""
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
"""The facts that count in each phase. A fact changes no phase; the decisions that follow from it do."""

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
"""The phase after each decision."""


def diagram() -> str:
    """The lifecycle as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> waiting: RequestSubmitted"]
    for phase, moves in DECISIONS.items():
        lines += [f"    {phase} --> {to}: {decision.__name__}" for decision, to in moves.items()]
    lines += [f"    {phase} --> [*]" for phase in Phase if phase.ended]
    return "\n".join(lines)
