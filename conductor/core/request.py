"""The state of one request, and the state of all ranks that requests depend on.

Both are immutable data: a fold creates the next state, tests and replay can keep earlier ones.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from conductor.core.lifecycle import DECISIONS, Phase
from shared.adapters import Adapter, adapter_name
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
"""Events by which the conductor records decisions about a request."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank according to the log. `incarnation` is None while the rank is absent.

    Attributes:
        weights: by node, the digest of what it has loaded.
        revision: where that is from on a hub, `org/name@commit`; empty for a folder.
    """

    incarnation: int | None
    kv_tokens: int = 0
    max_seq_len: int = 0
    weights: dict[str, str] = {}
    revision: str = ""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The state that requests share: the ranks, by log position, and so equal for every reader of the log."""

    ranks: dict[int, RankState] = {}

    def incarnation(self, rank: int) -> int | None:
        state = self.ranks.get(rank)
        return state.incarnation if state else None


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatched step.

    Attributes:
        index: number of the step in the plan run.
        partition: the name of its sub-plan; empty for the plan itself.
        position: its number in the sub-plan.
        walks: the names of its walks.
        incarnations: its ranks, with the incarnation of each.
        parts: by rank, the results of completed parts, one per walk.
        since_ns: storage time of its first order, by the log's clock; 0 before that.
        stored: by rank, the log position of its order.
        is_quarantined: its ranks report when they begin and when they progress.
        begun: the ranks that have reported that they began.
    """

    index: int
    partition: str = ""
    position: int = 0
    walks: tuple[str, ...] = ()
    incarnations: dict[int, int]
    parts: dict[int, tuple[WalkResult, ...]] = {}
    since_ns: int = 0
    stored: dict[int, int] = {}
    is_quarantined: bool = False
    begun: frozenset[int] = frozenset()


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt counter of a request, and the evidence that it kills workers.

    Every request has one (`conductor.core.poison_pills`). Without `dead_incarnations` it is no suspect.

    Attributes:
        tries: consecutive attempts without progress, including the running one.
        dead_incarnations: by rank, the incarnation that ended last while a step of this request ran there.
        required_progress: by sub-plan, the position at the death; a step there must produce new output.
        closed: ranks that accept no other request since the resumption.
        alone_on: those of `closed` on which no other request runs at all, not even a proven one.
        in_doubt: a worker died while other requests ran there too. The next attempt runs alone.
        tensor_losses: incarnations that lost a tensor. The loss used up an attempt; their end does not.
        proven: it was a suspect and has made progress since.
    """

    tries: int = 1
    dead_incarnations: dict[int, int] = {}
    required_progress: dict[str, int] = {}
    closed: frozenset[int] = frozenset()
    alone_on: frozenset[int] = frozenset()
    in_doubt: bool = False
    tensor_losses: frozenset[int] = frozenset()
    proven: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, folded so far.

    Attributes:
        submitted_ns: time of submission, by the log's clock.
        loaded: the adapter that its model's name ended with, if that was loaded at the submission's position.
        placement: each node's rank, with exceptions by walk in `walk_placement`; as last admitted or resumed.
        lives: the incarnations that were recorded with it; empty in older logs.
        weights: the digests that were recorded with it (`conductor.core.weights`); empty in older logs.
        weights_since: the attempt in which they replaced other ones; 0 if they did not.
        resumptions: number of resumptions.
        running: the dispatched steps, by index.
        results: recorded results of the plan's steps; with the submission, all that a plan depends on.
        tracks: reported output so far, by track name.
        cached_tokens: how many tokens of its prompt were cached when a node began with them: the most that
            one reported.
        expected: decisions made here and not read from the log yet, by event id.
        recorded: ids of decisions in the log; a second copy has no effect.
        history: the chained digest of the bytes of every fact that counted.
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
    lives: dict[str, int] = {}
    weights: dict[str, str] = {}
    weights_since: int = 0
    loaded: Adapter | None = None
    resumptions: int = 0
    suspicion: Suspicion = Suspicion()
    running: tuple[Running, ...] = ()
    results: tuple[RecordedResult, ...] = ()
    tracks: dict[str, OutputTotals] = {}
    cached_tokens: int = 0
    expected: dict[str, Decision] = {}
    recorded: frozenset[str] = frozenset()

    @property
    def limits(self) -> Limits:
        assert self.admitted is not None, "only an admitted request has limits"
        return self.admitted.limits

    @property
    def tenant(self) -> str:
        """The tenant; empty if unknown."""
        return self.submission.tenant or ""

    @property
    def deadline_ns(self) -> int | None:
        """The end of its time limit, by the log's clock; None without a limit."""
        timeout_s = self.submission.timeout_s
        return None if timeout_s is None else self.submitted_ns + round(timeout_s * _NS_PER_S)

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks it is placed on."""
        return ranks_of(self.placement, self.walk_placement)

    def step(self, index: int) -> Running | None:
        """The running step with this index, if any."""
        return next((step for step in self.running if step.index == index), None)


def ranks_of(placement: dict[str, int], walk_placement: dict[str, dict[str, int]]) -> frozenset[int]:
    """All ranks of a placement."""
    elsewhere = (rank for nodes in walk_placement.values() for rank in nodes.values())
    return frozenset((*placement.values(), *elsewhere))


def submitted(
    request_id: str,
    event: RequestSubmitted,
    record: StoredRecord,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
) -> Request:
    """The first state of a request, from its recorded event; `adapters` are those loaded before it."""
    return Request(
        id=request_id,
        submission=event,
        submission_seq=record.seq,
        submitted_ns=record.time_ns,
        digest=submission_digest(event),
        loaded=adapters.get(adapter_name(event.model)),
        history=chained(b"", record.data),
    )


def decided(request: Request, *decisions: Decision) -> Request:
    """Apply decisions to a request: change its phase, and expect each decision in the log."""
    phase, expected = request.phase, dict(request.expected)
    for decision in decisions:
        next_phases = DECISIONS.get(phase, {})
        if type(decision) not in next_phases:
            raise BugError(f"request {request.id}: {type(decision).__name__} cannot be decided when {phase}")
        phase = next_phases[type(decision)]
        expected[decision.id] = decision
    running = () if phase.ended else request.running
    return msgspec.structs.replace(request, phase=phase, expected=expected, running=running)


def confirmed(request: Request, decision_id: str) -> Request:
    """Apply the confirmation of one expected decision by the log."""
    expected = dict(request.expected)
    del expected[decision_id]
    return msgspec.structs.replace(request, expected=expected, recorded=request.recorded | {decision_id})


def archived(request: Request) -> Request:
    """Return an ended request without its input and results, which can be large.

    The rest suffices to recognise later events: duplicates, late facts, a second submission.
    """
    submission = msgspec.structs.replace(request.submission, inputs=_FORGOTTEN)
    return msgspec.structs.replace(request, submission=submission, results=(), tracks={})


_FORGOTTEN: Final = Inputs(token_ids=[])


def chained(history: bytes, data: bytes) -> bytes:
    """The digest of a history extended by one fact; 16 bytes."""
    return hashlib.blake2b(history + data, digest_size=16).digest()


_UNSTAMPED: Final = {"writer": "", "number": 0, "epoch": None}


def same(recorded: Event, expected: Event) -> bool:
    """Tell whether a recorded decision equals the expected one in all fields but writer and time."""
    return msgspec.structs.replace(recorded, **_UNSTAMPED) == expected
