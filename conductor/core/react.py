"""`react`: what a request's state becomes by one event, and what is decided because of it.

Pure, and a function of this request's own log alone (and of the `World`, which is a fold of the log
too): so whoever folds the same log decides the same. Three kinds of event come in:

- *facts* (cancel, walk completed, a worker's life begins or ends, ...) lead to decisions, which are
  *expected* from then on until the log shows them;
- *decisions that depend on the world* (`request.admitted`, `.rejected`, `.resumed`): `schedule` made them,
  and here they are taken as facts, at their position in the log and not before;
- *recorded decisions of ours*: they are compared with what is expected. The same: confirmed. A second
  copy: nothing. Another: a `Divergence`.

How decisions are put together is in `conductor.core.orders`; what is held against a request under which
workers die, in `conductor.core.poison_pills`.
"""

from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from conductor.core import poison_pills
from conductor.core.lifecycle import FACTS, Phase
from conductor.core.orders import (
    cancelled,
    failed,
    fence,
    finished,
    grown,
    is_on_probation,
    merged,
    order,
    stop,
    too_large,
    with_step,
)
from conductor.core.request import (
    Decision,
    Request,
    Running,
    Suspicion,
    World,
    chained,
    confirmed,
    decided,
    same,
)
from configs.placement import rank_of
from models.base import ModelGraph
from shared.errors import BugError, DalSegnoError, Divergence, TensorGone
from shared.events import (
    DeadlinePassed,
    Failure,
    NodeReady,
    RequestAdmitted,
    RequestCancel,
    RequestRejected,
    RequestResumed,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.log.port import StoredRecord
from shared.plan_run import PendingStep, PlanRun
from shared.plans import Finish, PlanRequest, StepResult
from shared.tensors import Handle
from shared.transcript import combined

_INDEX_DIGITS: Final = 9
_NS_PER_S: Final = 1_000_000_000

LifeEnd = WorkerJoined | WorkerLeaving | WorkerLost
"""What ends the life of a rank that ran before: the next one's beginning ends it, too."""
Fact = RequestCancel | DeadlinePassed | WalkBegun | WalkProgressed | WalkCompleted | WalkFailed | LifeEnd


class Reaction(msgspec.Struct, frozen=True):
    """The state after an event, and the decisions to put into the log because of it, in order."""

    request: Request
    decisions: tuple[Decision, ...] = ()


class Deadline(msgspec.Struct, frozen=True):
    """A time limit of a request, or of one of its steps: `deadline.passed` says that it is over."""

    at_ns: int
    request_id: str
    attempt: int
    step: int | None = None


class _Step(msgspec.Struct, frozen=True):
    """One step of a plan, and the ranks that host the nodes of its walks."""

    asked: PendingStep
    ranks: tuple[int, ...]


class Reactor:
    """`react`, with the families' graphs at hand and a cache of running plans (rebuilt when missing)."""

    def __init__(self, graph_of: Callable[[str], ModelGraph]) -> None:
        self._graph_of = graph_of
        self._journeys: dict[str, PlanRun] = {}

    # ---- facts -------------------------------------------------------------------------------------
    def fact(self, request: Request, event: Fact, record: StoredRecord, world: World) -> Reaction:
        """Fold one fact, as the log has it. `world` is as it was before a life began or ended by it."""
        if type(event) not in FACTS.get(request.phase, ()) or not concerns(request, event, record, world):
            return Reaction(request)  # late, a duplicate, or another attempt's: kept, and nothing changes
        request = msgspec.structs.replace(request, history=chained(request.history, record.data))
        match event:
            case WalkCompleted():
                return self._done(request, event, world)
            case WalkBegun():
                step = request.step(event.index)
                assert step is not None
                step = msgspec.structs.replace(step, begun=step.begun | {event.rank})
                return Reaction(msgspec.structs.replace(request, running=with_step(request.running, step)))
            case WalkProgressed():
                step = request.step(event.index)
                assert step is not None
                further = poison_pills.after_progress(request, step)
                return Reaction(msgspec.structs.replace(request, suspicion=further))
            case WalkFailed():
                return self._failed(request, event, world)
            case RequestCancel():
                return self._stopped(request, event.reason, cancelled(request, event.reason))
            case DeadlinePassed():
                failure = _too_late(request, event)
                return self._stopped(request, failure.message, failed(request, failure))
            case WorkerJoined() | WorkerLeaving() | WorkerLost():
                return self._interrupt(request, event, world)
            case _:
                assert_never(event)

    def _done(self, request: Request, event: WalkCompleted, world: World) -> Reaction:
        """A rank has done its part of a step; the plan goes on when all of them have."""
        step = request.step(event.index)
        assert step is not None
        tracks = grown(request.tracks, {"": event.output, **event.tracks})
        request = msgspec.structs.replace(request, tracks=tracks)
        parts = step.parts | {event.rank: tuple(event.results)}
        if parts.keys() != step.lives.keys():
            step = msgspec.structs.replace(step, parts=parts)
            return Reaction(msgspec.structs.replace(request, running=with_step(request.running, step)))
        results = merged(parts)
        if isinstance(results, str):
            message = f"step {step.index}: {results}"
            return self._end(request, failed(request, Failure(code=BugError.code, message=message)))
        request = msgspec.structs.replace(
            request,
            suspicion=poison_pills.after_step(request, step),
            results=(*request.results, (step.index, StepResult(results, combined(tracks)))),
            running=tuple(one for one in request.running if one.index != step.index),
        )
        return self._advance(request, world)

    def _failed(self, request: Request, event: WalkFailed, world: World) -> Reaction:
        """A rank could not do its part: the end, but if only a tensor is gone, its producer runs again."""
        producer = _step_of(event.gone, request.id)
        if event.failure.code != TensorGone.code or producer is None:
            return self._end(request, failed(request, event.failure))
        if isinstance(otherwise := self._steps_again(request), Failure):
            return self._end(request, failed(request, otherwise))
        journey = self._journey(request)
        behind = journey.results_before(producer)
        if behind is None:
            return self._end(request, failed(request, event.failure))
        # With a life that is over its tensors are gone; of one that runs, none should be.
        is_over = event.gone_rank is not None and world.incarnation(event.gone_rank) != event.gone_life
        if not is_over and poison_pills.exhausted(request):
            message = (
                f"{event.failure.message}; this was try {request.suspicion.tries} of "
                f"{request.limits.max_attempts} without progress (max_attempts)"
            )
            failure = msgspec.structs.replace(event.failure, message=message)
            return self._end(request, failed(request, failure))
        reason = f"tensor {event.gone} is gone: step {producer}, which made it, runs again"
        against = request.suspicion if is_over else poison_pills.after_loss(request, event.gone_life)
        held, decisions = self._hold(request, journey.restart_point(behind), reason, against, world)
        reaction = self._go_on(held, world, why=reason)
        return Reaction(reaction.request, (*decisions, *reaction.decisions))

    def _interrupt(self, request: Request, event: LifeEnd, world: World) -> Reaction:
        """The life of a rank that this request is placed on is over: what was sent out begins again."""
        if isinstance(otherwise := self._steps_again(request), Failure):
            return self._end(request, failed(request, otherwise))
        rank, life = event.rank, world.incarnation(event.rank)
        assert life is not None
        against, reason = poison_pills.after_leaving(request), _how_it_ended(event, life)
        if not isinstance(event, WorkerLeaving):
            read_seq = event.read_seq if isinstance(event, WorkerLost) else None
            if poison_pills.counts(request, rank, life, read_seq) and poison_pills.exhausted(request):
                return self._end(request, failed(request, _given_up(request, rank, reason)))
            against = poison_pills.after_death(request, rank, life, read_seq)
        steps = [str(step.index) for step in request.running]
        undone = f"step {steps[0]} was" if len(steps) == 1 else f"steps {', '.join(steps)} were"
        reason = f"{reason}, before {undone} done"
        keep = self._journey(request).restart_point(len(request.results))
        gone = msgspec.structs.replace(world.ranks[rank], incarnation=None)
        held, decisions = self._hold(request, keep, reason, against, World(ranks=world.ranks | {rank: gone}))
        return Reaction(held, decisions)

    def _hold(
        self, request: Request, keep: int, reason: str, held_against: Suspicion, world: World
    ) -> tuple[Request, tuple[Decision, ...]]:
        """Go back to where the first `keep` results led to, as the next attempt, and wait there.

        Or to before that, where those results are tensors that are gone with a life. What was put out before
        counts, what its ranks still put out does not; those that live are told.
        """
        stops = tuple(
            stop(request, step, rank, reason)
            for step in request.running
            for rank, life in step.lives.items()
            if world.incarnation(rank) == life
        )
        held = msgspec.structs.replace(
            request,
            attempt=request.attempt + 1,
            results=request.results[: self._lasting(request, keep, world)],
            running=(),
            suspicion=held_against,
        )
        decisions: tuple[Decision, ...] = (fence(held, reason), *stops)
        return decided(held, *decisions), decisions

    def _lasting(self, request: Request, keep: int, world: World) -> int:
        """How many of the first `keep` results lead to steps whose tensors are all of lives that run."""
        journey = self._journey(request)
        while True:
            steps = self._next_steps(msgspec.structs.replace(request, results=request.results[:keep]))
            if isinstance(steps, Failure | Finish):
                return keep
            lost = [
                producer
                for step in steps
                for walk in step.asked.walks
                for handle in walk.inputs.values()
                if _is_over(handle, world) and (producer := _step_of(handle.key, request.id)) is not None
            ]
            behind = journey.results_before(min(lost)) if lost else None
            if behind is None or journey.restart_point(behind) >= keep:
                return keep
            keep = journey.restart_point(behind)

    def _stopped(self, request: Request, reason: str, end: Decision) -> Reaction:
        """The end, before the plan's: every rank is told to leave what it does for the request."""
        stops = [stop(request, step, rank, reason) for step in request.running for rank in step.lives]
        return self._end(request, *stops, end)

    # ---- the plan ----------------------------------------------------------------------------------
    def _advance(self, request: Request, world: World) -> Reaction:
        """Ask the plan what follows the results there are."""
        steps = self._next_steps(request)
        if isinstance(steps, Failure):
            return self._end(request, failed(request, steps))
        if isinstance(steps, Finish):
            return self._end(request, finished(request, steps))
        return self._dispatch(request, steps, world)

    def _go_on(self, request: Request, world: World, why: str | None = None) -> Reaction:
        """Send out what is at hand, and was before."""
        steps = self._steps_again(request)
        if isinstance(steps, Failure):
            return self._end(request, failed(request, steps))
        return self._dispatch(request, steps, world, why)

    def _steps_again(self, request: Request) -> tuple[_Step, ...] | Failure:
        """The steps at hand, where there were some behind the same results before."""
        steps = self._next_steps(request)
        if not isinstance(steps, Failure | Finish):
            return steps
        message = f"the plan goes on otherwise than before, from the same results: {steps}"
        return Failure(code=Divergence.code, message=message)

    def _next_steps(self, request: Request) -> tuple[_Step, ...] | Finish | Failure:
        try:
            steps = self._journey(request).advance(request.results)
            if isinstance(steps, Finish):
                return steps
            return tuple(_Step(step, self._ranks_of(step, request)) for step in steps)
        except DalSegnoError as error:
            return Failure(code=error.failure_code, message=error.message, status=error.failure_status)
        except Exception as error:  # noqa: BLE001 - a plan is the model's code: its bug ends its own request
            message = f"the plan failed: {type(error).__name__}: {error}"
            return Failure(code="internal_error", message=message)

    def _ranks_of(self, step: PendingStep, request: Request) -> tuple[int, ...]:
        assert request.admitted is not None
        graph = self._graph_of(request.admitted.family)
        unknown = [walk.name for walk in step.walks if walk.name not in graph.walks]
        if unknown:
            raise BugError(f"the plan asks for the walks {unknown}; there are {sorted(graph.walks)}")
        streams = {name for name, _ in graph.streams}
        if unknown := [name for name in step.ends if name not in streams]:
            raise BugError(f"the plan ends the streams {unknown}; there are {sorted(streams)}")
        ranks = {
            rank_of(request.placement, request.walk_placement, walk.name, node)
            for walk in step.walks
            for node in graph.walks[walk.name].nodes
        }
        return tuple(sorted(ranks))

    def _dispatch(
        self, request: Request, steps: tuple[_Step, ...], world: World, why: str | None = None
    ) -> Reaction:
        """Send the steps at hand, each to all of its ranks; those that are out already stay as they are.

        While any rank is away that the request is placed on, it is held: what began now would begin again
        when that one's next life joins.
        """
        lives = {rank: world.incarnation(rank) for rank in sorted(request.ranks)}
        there = {rank: life for rank, life in lives.items() if life is not None}
        if len(there) < len(lives):
            return Reaction(msgspec.structs.replace(request, phase=Phase.HELD))
        out = {step.index: step for step in request.running}
        running: list[Running] = []
        orders: list[NodeReady] = []
        for step in steps:
            asked = step.asked
            if asked.index not in out:
                orders += [order(request, asked, rank, there, why) for rank in step.ranks]
            running.append(out.get(asked.index) or _sent(request, step, there))
        for one in orders:
            if failure := too_large(one, request.limits.max_event_bytes):
                return self._end(request, failed(request, failure))
        request = msgspec.structs.replace(request, running=tuple(running))
        return Reaction(decided(request, *orders), tuple(orders))

    def _journey(self, request: Request) -> PlanRun:
        journey = self._journeys.get(request.id)
        if journey is None:
            assert request.admitted is not None
            journey = self._journeys[request.id] = PlanRun(
                self._graph_of(request.admitted.family),
                PlanRequest(
                    request_id=request.id,
                    inputs=request.submission.inputs,
                    params=request.submission.params,
                    limits=request.admitted.limits,
                    seed=request.admitted.seed,
                ),
            )
        return journey

    def _end(self, request: Request, *decisions: Decision) -> Reaction:
        self.forget(request.id)
        return Reaction(decided(request, *decisions), decisions)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""
        self._journeys.pop(request_id, None)

    # ---- decisions, as the log shows them ----------------------------------------------------------
    def recorded(self, request: Request, event: Decision, record: StoredRecord, world: World) -> Reaction:
        """Fold one decision read from the log.

        Raises:
            Divergence: it is not what was decided here from the same facts; `request` is left as it was.
        """
        if event.id in request.recorded:
            return Reaction(request)  # a second copy of what is known
        if event.id in request.expected:
            return Reaction(self._confirm(request, event, record))
        match event:
            case RequestAdmitted():
                return self._admit(request, event, record.data, world)
            case RequestResumed():
                return self._resume(request, event, record.data, world)
            case RequestRejected():
                return self._reject(request, event, record.data)
            case _:
                raise Divergence(
                    f"request {request.id}: {event.id} is recorded, but the facts before it do not lead to it"
                )

    def _confirm(self, request: Request, event: Decision, record: StoredRecord) -> Request:
        if not same(event, request.expected[event.id]):
            raise Divergence(f"request {request.id}: {event.id} is recorded otherwise than decided")
        request = confirmed(request, event.id)
        step = request.step(event.index) if isinstance(event, NodeReady) else None
        if step is None or request.attempt != event.attempt:
            return request
        assert isinstance(event, NodeReady)
        known = msgspec.structs.replace(
            step, since_ns=step.since_ns or record.time_ns, stored=step.stored | {event.rank: record.seq}
        )
        return msgspec.structs.replace(request, running=with_step(request.running, known))

    def _admit(self, request: Request, event: RequestAdmitted, data: bytes, world: World) -> Reaction:
        if request.phase.ended:
            return Reaction(request)  # cancelled before the admission was stored
        if event.pins.submission != request.digest:
            raise Divergence(
                f"request {request.id}: admitted is {event.pins.submission}, submitted {request.digest}"
            )
        request = msgspec.structs.replace(
            request,
            history=chained(request.history, data),
            attempt=1,
            admitted=event,
            placement=event.placement,
            walk_placement=event.walk_placement,
        )
        return self._advance(confirmed(decided(request, event), event.id), world)

    def _resume(self, request: Request, event: RequestResumed, data: bytes, world: World) -> Reaction:
        if request.phase is not Phase.HELD or event.attempt != request.attempt:
            return Reaction(request)  # it ended before it was resumed
        held_against = msgspec.structs.replace(
            request.suspicion, closed=frozenset(event.closed), alone_on=frozenset(event.alone_on)
        )
        request = msgspec.structs.replace(
            request,
            history=chained(request.history, data),
            placement=event.placement,
            walk_placement=event.walk_placement,
            resumptions=request.resumptions + 1,
            suspicion=held_against if event.on_probation else poison_pills.CLEARED,
        )
        return self._go_on(confirmed(decided(request, event), event.id), world, why=event.reason)

    def _reject(self, request: Request, event: RequestRejected, data: bytes) -> Reaction:
        if event.submission_seq != request.submission_seq or _has_ended(request):
            return Reaction(request)  # it refuses another submission under this id, or comes too late
        # An end that was decided meanwhile comes behind this one, and changes nothing any more.
        request = msgspec.structs.replace(
            request,
            phase=Phase.WAITING,
            expected={},
            recorded=request.recorded | request.expected.keys(),
            history=chained(request.history, data),
        )
        return Reaction(confirmed(decided(request, event), event.id))


def _has_ended(request: Request) -> bool:
    """Whether an end of it is in the log, or it was admitted, so that it cannot be rejected any more."""
    return request.admitted is not None or (request.phase.ended and not request.expected)


def deadlines(request: Request) -> list[Deadline]:
    """The time limits of a request that has not ended: its own, and those of the steps that are out."""
    found = []
    if request.deadline_ns is not None:
        found.append(Deadline(request.deadline_ns, request.id, request.attempt))
    limits = request.limits.walk_timeouts_s if request.admitted is not None else {}
    for step in request.running if limits else ():
        if step.since_ns and all(name in limits for name in step.walks):
            at_ns = step.since_ns + round(sum(limits[name] for name in step.walks) * _NS_PER_S)
            found.append(Deadline(at_ns, request.id, request.attempt, step.index))
    return found


def concerns(request: Request, event: Fact, record: StoredRecord, world: World) -> bool:
    """Whether a fact is about a step that is out, or about the request as a whole."""
    match event:
        case WalkBegun() | WalkCompleted() | WalkFailed() | WalkProgressed():
            return is_of_a_step(request, event)
        case WorkerJoined() | WorkerLeaving() | WorkerLost():
            return event.rank in request.ranks and world.incarnation(event.rank) is not None
        case DeadlinePassed():
            # The log's time has the last word: an early one is void, and said again by the conductor.
            told = [
                one.step for one in deadlines(request) if event.deadline_ns == one.at_ns <= record.time_ns
            ]
            return event.step in told and event.attempt == request.attempt
        case RequestCancel():
            return True
        case _:
            assert_never(event)


def is_of_a_step(request: Request, event: WalkBegun | WalkCompleted | WalkFailed | WalkProgressed) -> bool:
    """Whether a worker's report is of a step that is out, and of its part, which is not told yet."""
    step = request.step(event.index)
    return (
        step is not None
        and event.attempt == request.attempt
        and event.rank in step.lives
        and event.rank not in step.parts
        and event.incarnation == step.lives[event.rank]
    )


def _is_over(handle: Handle, world: World) -> bool:
    """Whether the life is over that a tensor's bytes were in."""
    return handle.rank is not None and world.incarnation(handle.rank) != handle.incarnation


def _sent(request: Request, step: _Step, lives: dict[int, int]) -> Running:
    return Running(
        index=step.asked.index,
        partition=step.asked.partition,
        position=step.asked.position,
        walks=tuple(walk.name for walk in step.asked.walks),
        lives={rank: lives[rank] for rank in step.ranks},
        on_probation=is_on_probation(request),
    )


def _how_it_ended(event: LifeEnd, life: int) -> str:
    match event:
        case WorkerJoined():
            return f"rank {event.rank} began a new life, its old one ({life}) is over"
        case WorkerLeaving():
            return f"rank {event.rank} left in order"
        case WorkerLost():
            return f"rank {event.rank} was lost ({event.reason})"
        case _:
            assert_never(event)


def _given_up(request: Request, rank: int, reason: str) -> Failure:
    tries = request.suspicion.tries
    often = f"workers died {tries} times in a row under this request" if tries > 1 else "its worker died"
    limit = f"max_attempts is {request.limits.max_attempts}"
    if rank in request.suspicion.alone_on:
        message = (
            f"{often}, the last time with nothing else beside it: {reason}; {limit}, so it is not tried again"
        )
        return Failure(code="poison_request", message=message)
    return Failure(code="worker_lost", message=f"{often}: {reason}; {limit}")


def _too_late(request: Request, event: DeadlinePassed) -> Failure:
    if event.step is None:
        message = f"not done {request.submission.timeout_s:g} s after it was submitted (timeout_s)"
    else:
        step = request.step(event.step)
        assert step is not None
        limit_s = sum(request.limits.walk_timeouts_s[name] for name in step.walks)
        message = f"step {event.step} ({' then '.join(step.walks)}) took longer than {limit_s:g} s"
    return Failure(code="deadline_exceeded", message=message, status=504)


def _step_of(key: str | None, request_id: str) -> int | None:
    """The step that made a tensor, of its key `request/attempt/step/...`; None for one of another kind."""
    match (key or "").split("/"):
        case [of, _, step, *_] if of == request_id and step.isdecimal() and len(step) <= _INDEX_DIGITS:
            return int(step)
        case _:
            return None
