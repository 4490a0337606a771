"""The life of a request as a table: `phase x event -> phase`.

One dictionary says what may happen; the diagram in `docs/lifecycle.md` is drawn from it, so the picture
cannot drift from the table. A missing key has one of two meanings, and both are visible branches in
`conductor.core.react`: for a *fact* it means "too late, or not for this phase": it is kept in the log and
changes nothing; for a *decision* it means that somebody decided what cannot be decided here.
"""

from enum import StrEnum
from typing import Final

from shared.events import (
    Event,
    NodeReady,
    OutputFence,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WalkCompleted,
    WalkFailed,
    WalkStop,
    WorkerJoined,
)


class Phase(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Submitted, not admitted yet."""
    RUNNING = "running"
    """Admitted; a step of its plan is dispatched, or waits for its rank to come back."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"

    @property
    def ended(self) -> bool:
        return self is not Phase.WAITING and self is not Phase.RUNNING


FACTS: Final[dict[Phase, frozenset[type[Event]]]] = {
    Phase.WAITING: frozenset({RequestCancel}),
    Phase.RUNNING: frozenset({RequestCancel, WalkCompleted, WalkFailed, WorkerJoined}),
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
        OutputFence: Phase.RUNNING,
        WalkStop: Phase.RUNNING,
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
