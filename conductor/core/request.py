"""The state of one request, and of the world as far as requests depend on it.

Both are plain immutable data: a fold makes the next one, a test or a replay can keep the one before.
"""

import hashlib
from typing import Final, TypeAlias

import msgspec

from conductor.core.lifecycle import DECISIONS, Phase
from shared.errors import BugError
from shared.events import (
    Event,
    Inputs,
    Limits,
    NodeReady,
    OutputFence,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkStop,
    submission_digest,
)
from shared.plans import StepResult

Decision: TypeAlias = (
    RequestAdmitted
    | RequestRejected
    | NodeReady
    | WalkStop
    | OutputFence
    | RequestFinished
    | RequestFailed
    | RequestCancelled
)
"""What the conductor puts into the log about a request."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the log tells it. `incarnation` is None while no life of it is known to run."""

    incarnation: int | None
    kv_tokens: int = 0
    max_seq_len: int = 0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What requests share: the ranks, by log position, so the same for every reader of the log."""

    ranks: dict[int, RankState] = {}

    def incarnation(self, rank: int) -> int | None:
        state = self.ranks.get(rank)
        return state.incarnation if state else None


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """The step at hand. `incarnation` is None while it waits for its rank to join."""

    index: int
    rank: int
    incarnation: int | None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, folded so far.

    Attributes:
        results: what its plan's steps came to; with the submission, all a plan depends on.
        expected: decided here, not yet seen in the log, by event id.
        recorded: ids of decisions seen in the log: a second copy of one changes nothing.
        history: the chained digest of every fact that counted, as its bytes stand in the log.
    """

    id: str
    submission: RequestSubmitted
    submission_seq: int
    digest: str
    history: bytes
    phase: Phase = Phase.WAITING
    attempt: int = 0
    admitted: RequestAdmitted | None = None
    running: Running | None = None
    results: tuple[StepResult, ...] = ()
    expected: dict[str, Decision] = {}
    recorded: frozenset[str] = frozenset()

    @property
    def limits(self) -> Limits:
        assert self.admitted is not None, "only an admitted request has limits"
        return self.admitted.limits


def submitted(request_id: str, event: RequestSubmitted, seq: int, data: bytes) -> Request:
    """A request's first state; `data` are the event's bytes in the log."""
    return Request(
        id=request_id,
        submission=event,
        submission_seq=seq,
        digest=submission_digest(event),
        history=chained(b"", data),
    )


def decided(request: Request, *decisions: Decision) -> Request:
    """The request with these decisions made: phases moved, and each expected in the log."""
    phase, expected = request.phase, dict(request.expected)
    for decision in decisions:
        moves = DECISIONS.get(phase, {})
        if type(decision) not in moves:
            raise BugError(f"request {request.id}: {type(decision).__name__} cannot be decided when {phase}")
        phase = moves[type(decision)]
        expected[decision.id] = decision
    running = None if phase.ended else request.running
    return msgspec.structs.replace(request, phase=phase, expected=expected, running=running)


def confirmed(request: Request, decision_id: str) -> Request:
    """The request with one expected decision seen in the log."""
    expected = dict(request.expected)
    del expected[decision_id]
    return msgspec.structs.replace(request, expected=expected, recorded=request.recorded | {decision_id})


def archived(request: Request) -> Request:
    """An ended request without what its client wrote and its walks put out: prompts can be large.

    What is left recognises every event that may still come: duplicates, late facts, a second submission.
    """
    submission = msgspec.structs.replace(request.submission, inputs=_FORGOTTEN)
    return msgspec.structs.replace(request, submission=submission, results=())


_FORGOTTEN: Final = Inputs(token_ids=[])


def chained(history: bytes, data: bytes) -> bytes:
    """The digest of a history grown by one fact; 16 bytes."""
    return hashlib.blake2b(history + data, digest_size=16).digest()


_UNSTAMPED: Final = {"writer": "", "number": 0, "epoch": None}


def same(recorded: Event, expected: Event) -> bool:
    """Whether a recorded decision is the expected one: all fields but who stored it, and when."""
    return msgspec.structs.replace(recorded, **_UNSTAMPED) == expected
