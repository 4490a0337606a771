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
    OutputTotals,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkResult,
    WalkStop,
    submission_digest,
)
from shared.plans import Recorded

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
    """A step at hand.

    Attributes:
        index: the step's on the journey; `partition` is the sub-plan's whose step it is.
        lives: the ranks it was sent to, and which life of each; none while it waits for a rank to join.
        parts: by rank, what those came to that have done theirs: one result for each walk.
    """

    index: int
    partition: str = ""
    lives: dict[int, int] = {}
    parts: dict[int, tuple[WalkResult, ...]] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, folded so far.

    Attributes:
        running: the steps at hand, in order of their indices.
        results: what its plan's steps came to, as recorded; with the submission, all a plan depends on.
        tracks: what was put out so far, as reported last, by the track's name.
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
    running: tuple[Running, ...] = ()
    results: tuple[Recorded, ...] = ()
    tracks: dict[str, OutputTotals] = {}
    expected: dict[str, Decision] = {}
    recorded: frozenset[str] = frozenset()

    @property
    def limits(self) -> Limits:
        assert self.admitted is not None, "only an admitted request has limits"
        return self.admitted.limits

    def step(self, index: int) -> Running | None:
        """The step at hand that has this index."""
        return next((step for step in self.running if step.index == index), None)


def ranks_of(admitted: RequestAdmitted) -> frozenset[int]:
    """Every rank that a request is placed on."""
    elsewhere = (rank for nodes in admitted.walk_placement.values() for rank in nodes.values())
    return frozenset((*admitted.placement.values(), *elsewhere))


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
    running = () if phase.ended else request.running
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
    return msgspec.structs.replace(request, submission=submission, results=(), tracks={})


_FORGOTTEN: Final = Inputs(token_ids=[])


def chained(history: bytes, data: bytes) -> bytes:
    """The digest of a history grown by one fact; 16 bytes."""
    return hashlib.blake2b(history + data, digest_size=16).digest()


_UNSTAMPED: Final = {"writer": "", "number": 0, "epoch": None}


def same(recorded: Event, expected: Event) -> bool:
    """Whether a recorded decision is the expected one: all fields but who stored it, and when."""
    return msgspec.structs.replace(recorded, **_UNSTAMPED) == expected
