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
    RequestResumed,
    RequestSubmitted,
    WalkResult,
    WalkStop,
    submission_digest,
)
from shared.log.port import StoredRecord
from shared.plan_run import RecordedResult

_NS_PER_S: Final = 1_000_000_000

Decision: TypeAlias = (
    RequestAdmitted
    | RequestRejected
    | RequestResumed
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
    """A step that was sent out.

    Attributes:
        index: the step's on the journey; `partition` is the sub-plan's whose step it is, and `position` the
            step's place in that.
        walks: their names.
        lives: the ranks it was sent to, and which life of each.
        parts: by rank, what those came to that have done theirs: one result for each walk.
        since_ns: when its first order was stored, by the log's time; 0 before that.
        stored: by rank, the position of its order in the log.
        on_probation: its ranks say when they begin, and when they are further than before; `begun` are those
            that have begun.
    """

    index: int
    partition: str = ""
    position: int = 0
    walks: tuple[str, ...] = ()
    lives: dict[int, int]
    parts: dict[int, tuple[WalkResult, ...]] = {}
    since_ns: int = 0
    stored: dict[int, int] = {}
    on_probation: bool = False
    begun: frozenset[int] = frozenset()


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """What is held against a request under which workers died (`conductor.core.poison_pills`).

    Attributes:
        tries: how many attempts in a row came no further, the one under way included.
        lives: by rank, the life that ended last while a step of this request ran there.
        hurdles: by sub-plan, the position of the step that was under way: to be passed.
        closed: the ranks on which nothing else begins since it was resumed; `alone_on`, those of them on
            which nothing at all runs beside it, not even the proven.
        in_doubt: a worker died under it while others were beside it: the next time it is to be alone.
        missed: lives of which a tensor was gone: that was a try, and their end is not another.
        proven: it was a suspect, and came further since.
    """

    tries: int = 1
    lives: dict[int, int] = {}
    hurdles: dict[str, int] = {}
    closed: frozenset[int] = frozenset()
    alone_on: frozenset[int] = frozenset()
    in_doubt: bool = False
    missed: frozenset[int] = frozenset()
    proven: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, folded so far.

    Attributes:
        submitted_ns: when it was submitted, by the log's time.
        placement: each node's rank, `walk_placement` where that is another one in a walk; as it was admitted,
            or resumed last.
        resumptions: how often it was resumed.
        running: the steps that are out, in order of their indices.
        results: what its plan's steps came to, as recorded; with the submission, all a plan depends on.
        tracks: what was put out so far, as reported last, by the track's name.
        expected: decided here, not yet seen in the log, by event id.
        recorded: ids of decisions seen in the log: a second copy of one changes nothing.
        history: the chained digest of every fact that counted, as its bytes stand in the log.
    """

    id: str
    submission: RequestSubmitted
    submission_seq: int
    submitted_ns: int
    digest: str
    history: bytes
    phase: Phase = Phase.WAITING
    attempt: int = 0
    admitted: RequestAdmitted | None = None
    placement: dict[str, int] = {}
    walk_placement: dict[str, dict[str, int]] = {}
    resumptions: int = 0
    suspicion: Suspicion = Suspicion()
    running: tuple[Running, ...] = ()
    results: tuple[RecordedResult, ...] = ()
    tracks: dict[str, OutputTotals] = {}
    expected: dict[str, Decision] = {}
    recorded: frozenset[str] = frozenset()

    @property
    def limits(self) -> Limits:
        assert self.admitted is not None, "only an admitted request has limits"
        return self.admitted.limits

    @property
    def tenant(self) -> str:
        """Whose it is; of who says nothing, nobody's."""
        return self.submission.tenant or ""

    @property
    def deadline_ns(self) -> int | None:
        """When it is to have ended, by the log's time; None is whenever it likes."""
        timeout_s = self.submission.timeout_s
        return None if timeout_s is None else self.submitted_ns + round(timeout_s * _NS_PER_S)

    @property
    def ranks(self) -> frozenset[int]:
        """Every rank it is placed on."""
        return ranks_of(self.placement, self.walk_placement)

    def step(self, index: int) -> Running | None:
        """The step with this index, if it is out."""
        return next((step for step in self.running if step.index == index), None)


def ranks_of(placement: dict[str, int], walk_placement: dict[str, dict[str, int]]) -> frozenset[int]:
    """Every rank of a placement."""
    elsewhere = (rank for nodes in walk_placement.values() for rank in nodes.values())
    return frozenset((*placement.values(), *elsewhere))


def submitted(request_id: str, event: RequestSubmitted, record: StoredRecord) -> Request:
    """A request's first state, from the event as the log has it."""
    return Request(
        id=request_id,
        submission=event,
        submission_seq=record.seq,
        submitted_ns=record.time_ns,
        digest=submission_digest(event),
        history=chained(b"", record.data),
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
