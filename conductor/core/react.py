"""`react`: the next state of a request after one event, and the decisions that follow.

Pure: a function of this request's own log and of the `World`, which is folded from the log too. Every
conductor that folds the same log decides the same. Three kinds of events come in:

- *facts* (cancel, walk completed, a worker joins or is lost, ...) lead to decisions, which are *expected*
  from then on until the log shows them;
- *decisions that depend on all requests* (`request.admitted`, `.rejected`, `.resumed`): made by `schedule`,
  and treated as facts here, at their position in the log;
- *recorded decisions*: compared with the expected one. Equal: confirmed. A second copy: ignored. Different:
  a `Divergence`.

A replay compares all fields of recorded decisions, also their `reason` and `failure`: rewording one of them
makes old logs diverge.

`conductor.core.orders` constructs decisions; `conductor.core.poison_pills` handles requests under which
workers die.
"""

from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from conductor.core import poison_pills, weights
from conductor.core.lifecycle import FACTS, Phase
from conductor.core.orders import (
    cancelled,
    failed,
    fence,
    finished,
    grown,
    is_quarantined,
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
from shared.subjects import worker_writer
from shared.tensors import Handle
from shared.transcript import combined

_INDEX_DIGITS: Final = 9
_NS_PER_S: Final = 1_000_000_000

IncarnationEnd = WorkerJoined | WorkerLeaving | WorkerLost
"""Events that end an incarnation. The join of the next incarnation ends the previous one too."""
Fact = (
    RequestCancel | DeadlinePassed | WalkBegun | WalkProgressed | WalkCompleted | WalkFailed | IncarnationEnd
)


class Reaction(msgspec.Struct, frozen=True):
    """The state after an event, and the decisions to publish because of it, in order."""

    request: Request
    decisions: tuple[Decision, ...] = ()


class Deadline(msgspec.Struct, frozen=True):
    """A time limit of a request or of one of its steps; `deadline.passed` records that it is over."""

    at_ns: int
    request_id: str
    attempt: int
    step: int | None = None


class _Step(msgspec.Struct, frozen=True):
    """A pending step of a plan, and the ranks that host the nodes of its walks."""

    pending: PendingStep
    ranks: tuple[int, ...]


class Reactor:
    """`react` with the graphs of the families and a cache of running plans, rebuilt when missing."""

    def __init__(self, graph_of: Callable[[str], ModelGraph]) -> None:
        self._graph_of = graph_of
        self._plan_runs: dict[str, PlanRun] = {}

    # ---- facts -------------------------------------------------------------------------------------
    def fact(self, request: Request, event: Fact, record: StoredRecord, world: World) -> Reaction:
        """Fold one fact. `world` is as it was before an incarnation began or ended by it."""
        if type(event) not in FACTS.get(request.phase, ()) or not concerns(request, event, record, world):
            return Reaction(request)  # late, a duplicate, or of another attempt
        request = msgspec.structs.replace(request, history=chained(request.history, record.data))
        match event:
            case WalkCompleted():
                return self._completed(request, event, world)
            case WalkBegun():
                step = request.step(event.index)
                assert step is not None
                step = msgspec.structs.replace(step, begun=step.begun | {event.rank})
                return Reaction(msgspec.structs.replace(request, running=with_step(request.running, step)))
            case WalkProgressed():
                step = request.step(event.index)
                assert step is not None
                suspicion = poison_pills.after_progress(request, step)
                return Reaction(msgspec.structs.replace(request, suspicion=suspicion))
            case WalkFailed():
                return self._failed(request, event, world)
            case RequestCancel():
                return self._abort(request, event.reason, cancelled(request, event.reason))
            case DeadlinePassed():
                failure = _deadline_failure(request, event)
                return self._abort(request, failure.message, failed(request, failure))
            case WorkerJoined() | WorkerLeaving() | WorkerLost():
                return self._interrupt(request, event, world)
            case _:
                assert_never(event)

    def _completed(self, request: Request, event: WalkCompleted, world: World) -> Reaction:
        """Record a rank's part of a step. The plan continues when all ranks have completed theirs."""
        step = request.step(event.index)
        assert step is not None
        tracks = grown(request.tracks, {"": event.output, **event.tracks})
        cached = max((work.cached_tokens for work in event.work.values()), default=0)
        request = msgspec.structs.replace(
            request, tracks=tracks, cached_tokens=max(request.cached_tokens, cached)
        )
        parts = step.parts | {event.rank: tuple(event.results)}
        if parts.keys() != step.incarnations.keys():
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
        """End the request because a rank failed. If only a tensor is gone, its producer runs again."""
        producer = _step_of(event.gone, request.id)
        if event.failure.code != TensorGone.code or producer is None:
            return self._end(request, failed(request, event.failure))
        if isinstance(divergence := self._repeated_steps(request), Failure):
            return self._end(request, failed(request, divergence))
        plan_run = self._plan_run(request)
        results_before = plan_run.results_before(producer)
        if results_before is None:
            return self._end(request, failed(request, event.failure))
        # An incarnation that is over takes its tensors with it; a running one should have all of them.
        is_over = event.gone_rank is not None and world.incarnation(event.gone_rank) != event.gone_life
        may_be_over = is_over or poison_pills.may_be_over(request, event.gone_life)
        if not may_be_over and poison_pills.exhausted(request):
            message = (
                f"{event.failure.message}; this was try {request.suspicion.tries} of "
                f"{request.limits.max_attempts} without progress (max_attempts)"
            )
            failure = msgspec.structs.replace(event.failure, message=message)
            return self._end(request, failed(request, failure))
        reason = f"tensor {event.gone} is gone: step {producer}, which made it, runs again"
        suspicion = request.suspicion if is_over else poison_pills.after_loss(request, event.gone_life)
        held, decisions = self._hold(
            request, plan_run.restart_point(results_before), reason, suspicion, world
        )
        reaction = self._continue(held, world, why=reason)
        return Reaction(reaction.request, (*decisions, *reaction.decisions))

    def _interrupt(self, request: Request, event: IncarnationEnd, world: World) -> Reaction:
        """Hold the request because an incarnation it is placed on ended; its running steps are repeated."""
        if isinstance(divergence := self._repeated_steps(request), Failure):
            return self._end(request, failed(request, divergence))
        rank, incarnation = event.rank, world.incarnation(event.rank)
        assert incarnation is not None
        suspicion, reason = poison_pills.after_leaving(request), _end_reason(event, incarnation)
        if not isinstance(event, WorkerLeaving):
            read_seq = event.read_seq if isinstance(event, WorkerLost) else None
            if poison_pills.uses_up_attempt(request, rank, incarnation, read_seq) and poison_pills.exhausted(
                request
            ):
                return self._end(request, failed(request, _attempts_exhausted(request, rank, reason)))
            suspicion = poison_pills.after_death(request, rank, incarnation, read_seq)
        steps = [str(step.index) for step in request.running]
        undone = f"step {steps[0]} was" if len(steps) == 1 else f"steps {', '.join(steps)} were"
        reason = f"{reason}, before {undone} done"
        keep = self._plan_run(request).restart_point(len(request.results))
        gone = msgspec.structs.replace(world.ranks[rank], incarnation=None)
        held, decisions = self._hold(
            request, keep, reason, suspicion, World(ranks=world.ranks | {rank: gone})
        )
        return Reaction(held, decisions)

    def _hold(
        self, request: Request, keep: int, reason: str, suspicion: Suspicion, world: World
    ) -> tuple[Request, tuple[Decision, ...]]:
        """Return to the state after the first `keep` results, start the next attempt, and hold it.

        Go back further if those results are tensors that are gone. Output released so far stays
        valid; later output of the old attempt is void, and live ranks are ordered to stop.
        """
        stops = tuple(
            stop(request, step, rank, reason)
            for step in request.running
            for rank, incarnation in step.incarnations.items()
            if world.incarnation(rank) == incarnation
        )
        held = msgspec.structs.replace(
            request,
            attempt=request.attempt + 1,
            results=request.results[: self._usable_results(request, keep, world)],
            running=(),
            suspicion=suspicion,
        )
        lives = request.lives if _is_as_recorded(request, world) else {}
        decisions: tuple[Decision, ...] = (fence(held, reason, lives), *stops)
        return decided(held, *decisions), decisions

    def _usable_results(self, request: Request, keep: int, world: World) -> int:
        """The number of first results, up to `keep`, whose following steps need no lost tensor."""
        plan_run = self._plan_run(request)
        while True:
            steps = self._next_steps(msgspec.structs.replace(request, results=request.results[:keep]))
            if isinstance(steps, Failure | Finish):
                return keep
            lost = [
                producer
                for step in steps
                for walk in step.pending.walks
                for handle in walk.inputs.values()
                if _is_over(handle, world) and (producer := _step_of(handle.key, request.id)) is not None
            ]
            results_before = plan_run.results_before(min(lost)) if lost else None
            if results_before is None or plan_run.restart_point(results_before) >= keep:
                return keep
            keep = plan_run.restart_point(results_before)

    def _abort(self, request: Request, reason: str, end: Decision) -> Reaction:
        """End the request before its plan does: every rank is ordered to abandon it."""
        stops = [stop(request, step, rank, reason) for step in request.running for rank in step.incarnations]
        return self._end(request, *stops, end)

    # ---- the plan ----------------------------------------------------------------------------------
    def _advance(self, request: Request, world: World) -> Reaction:
        """Ask the plan for the steps or the end that follow from the present results."""
        steps = self._next_steps(request)
        if isinstance(steps, Failure):
            return self._end(request, failed(request, steps))
        if isinstance(steps, Finish):
            return self._end(request, finished(request, steps))
        return self._dispatch(request, steps, world)

    def _continue(self, request: Request, world: World, why: str | None = None) -> Reaction:
        """Dispatch the due steps, including steps that were dispatched before."""
        steps = self._repeated_steps(request)
        if isinstance(steps, Failure):
            return self._end(request, failed(request, steps))
        return self._dispatch(request, steps, world, why)

    def _repeated_steps(self, request: Request) -> tuple[_Step, ...] | Failure:
        """The due steps. If the plan ends or fails where it asked for steps before: a divergence."""
        steps = self._next_steps(request)
        if not isinstance(steps, Failure | Finish):
            return steps
        message = f"the plan goes on otherwise than before, from the same results: {steps}"
        return Failure(code=Divergence.code, message=message)

    def _next_steps(self, request: Request) -> tuple[_Step, ...] | Finish | Failure:
        try:
            steps = self._plan_run(request).advance(request.results)
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
        """Send the due steps, each to all of its ranks. Steps that are already running stay.

        If a rank of the request is absent, the request is held: a step that starts now would be repeated
        when the next incarnation of that rank joins. It is also held if a rank has another incarnation than
        `schedule` saw: readers accept its output only from the recorded ones.
        """
        incarnations = {rank: world.incarnation(rank) for rank in sorted(request.ranks)}
        present = {rank: incarnation for rank, incarnation in incarnations.items() if incarnation is not None}
        if len(present) < len(incarnations) or not _is_as_recorded(request, world):
            return Reaction(msgspec.structs.replace(request, phase=Phase.HELD))
        already = {step.index: step for step in request.running}
        running: list[Running] = []
        orders: list[NodeReady] = []
        for step in steps:
            pending = step.pending
            if pending.index not in already:
                orders += [order(request, pending, rank, present, why) for rank in step.ranks]
            running.append(already.get(pending.index) or _started(request, step, present))
        for one in orders:
            if failure := too_large(one, request.limits.max_event_bytes):
                return self._end(request, failed(request, failure))
        request = msgspec.structs.replace(request, running=tuple(running))
        return Reaction(decided(request, *orders), tuple(orders))

    def _plan_run(self, request: Request) -> PlanRun:
        plan_run = self._plan_runs.get(request.id)
        if plan_run is None:
            assert request.admitted is not None
            plan_run = self._plan_runs[request.id] = PlanRun(
                self._graph_of(request.admitted.family),
                PlanRequest(
                    request_id=request.id,
                    inputs=request.submission.inputs,
                    params=request.submission.params,
                    limits=request.admitted.limits,
                    seed=request.admitted.seed,
                ),
            )
        return plan_run

    def _end(self, request: Request, *decisions: Decision) -> Reaction:
        self.forget(request.id)
        return Reaction(decided(request, *decisions), decisions)

    def forget(self, request_id: str) -> None:
        """Drop the cache of a request that has ended."""
        self._plan_runs.pop(request_id, None)

    # ---- recorded decisions ------------------------------------------------------------------------
    def recorded(self, request: Request, event: Decision, record: StoredRecord, world: World) -> Reaction:
        """Fold one decision read from the log.

        Raises:
            Divergence: it differs from the decision made here from the same facts; `request` is unchanged.
        """
        if event.id in request.recorded:
            return Reaction(request)  # a second copy
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
            lives=event.lives,
            weights=event.weights,
        )
        request = confirmed(decided(request, event), event.id)
        if failure := weights.conflict(event.weights):
            return self._end(request, failed(request, failure))
        return self._advance(request, world)

    def _resume(self, request: Request, event: RequestResumed, data: bytes, world: World) -> Reaction:
        if request.phase is not Phase.HELD or event.attempt != request.attempt:
            return Reaction(request)  # the request ended before it was resumed
        suspicion = msgspec.structs.replace(
            request.suspicion, closed=frozenset(event.closed), alone_on=frozenset(event.alone_on)
        )
        request = msgspec.structs.replace(
            request,
            history=chained(request.history, data),
            placement=event.placement,
            walk_placement=event.walk_placement,
            lives=event.lives,
            resumptions=request.resumptions + 1,
            suspicion=suspicion if event.on_probation else poison_pills.CLEARED,
        )
        request = confirmed(decided(request, event), event.id)
        placed = _with_weights(request, event.weights)
        if isinstance(placed, Failure):
            return self._end(request, failed(request, placed))
        return self._continue(placed, world, why=event.reason)

    def _reject(self, request: Request, event: RequestRejected, data: bytes) -> Reaction:
        if event.submission_seq != request.submission_seq or _has_ended(request):
            return Reaction(request)  # refuses another submission under this id, or is too late
        # An end that was decided meanwhile is stored after this one and changes nothing.
        request = msgspec.structs.replace(
            request,
            phase=Phase.WAITING,
            expected={},
            recorded=request.recorded | request.expected.keys(),
            history=chained(request.history, data),
        )
        return Reaction(confirmed(decided(request, event), event.id))


def _with_weights(request: Request, recorded: dict[str, str]) -> Request | Failure:
    """The request with the weights of its resumption. If they are others, it starts from the beginning.

    Output that was released by a step which has not completed is not known here: the ranks look for it.
    """
    if failure := weights.conflict(recorded):
        return failure
    changes = weights.changed(request.weights, recorded)
    if not changes:
        return msgspec.structs.replace(request, weights=request.weights | recorded)
    if any(totals.chunks for totals in request.tracks.values()):
        return weights.change_failure(changes)
    return msgspec.structs.replace(request, weights=recorded, weights_since=request.attempt, results=())


def _has_ended(request: Request) -> bool:
    """Tell whether the log has an end of the request, or an admission, after which it cannot be rejected."""
    return request.admitted is not None or (request.phase.ended and not request.expected)


def deadlines(request: Request) -> list[Deadline]:
    """The time limits of an open request: its own, and those of its running steps."""
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
    """Tell whether a fact is about a running step, or about the request as a whole."""
    match event:
        case WalkBegun() | WalkCompleted() | WalkFailed() | WalkProgressed():
            return is_of_a_step(request, event)
        case WorkerJoined() | WorkerLeaving() | WorkerLost():
            return event.rank in request.ranks and world.incarnation(event.rank) is not None
        case DeadlinePassed():
            # The log's time decides: an early event has no effect, and the conductor repeats it.
            passed = [
                one.step for one in deadlines(request) if event.deadline_ns == one.at_ns <= record.time_ns
            ]
            return event.step in passed and event.attempt == request.attempt
        case RequestCancel():
            return True
        case _:
            assert_never(event)


def is_of_a_step(request: Request, event: WalkBegun | WalkCompleted | WalkFailed | WalkProgressed) -> bool:
    """Tell whether a report is about a running step, and about a part that has not reported yet."""
    step = request.step(event.index)
    return (
        step is not None
        and event.attempt == request.attempt
        and event.rank in step.incarnations
        and event.rank not in step.parts
        and event.incarnation == step.incarnations[event.rank]
    )


def _is_as_recorded(request: Request, world: World) -> bool:
    """Tell whether the incarnations of its ranks are those that were recorded; an old log has none."""
    lives = request.lives
    return not lives or all(
        lives.get(worker_writer(rank)) == world.incarnation(rank) for rank in request.ranks
    )


def _is_over(handle: Handle, world: World) -> bool:
    """Tell whether the incarnation that held a tensor's bytes is over."""
    return handle.rank is not None and world.incarnation(handle.rank) != handle.incarnation


def _started(request: Request, step: _Step, incarnations: dict[int, int]) -> Running:
    return Running(
        index=step.pending.index,
        partition=step.pending.partition,
        position=step.pending.position,
        walks=tuple(walk.name for walk in step.pending.walks),
        incarnations={rank: incarnations[rank] for rank in step.ranks},
        is_quarantined=is_quarantined(request),
    )


def _end_reason(event: IncarnationEnd, incarnation: int) -> str:
    match event:
        case WorkerJoined():
            return f"rank {event.rank} began a new life, its old one ({incarnation}) is over"
        case WorkerLeaving():
            return f"rank {event.rank} left in order"
        case WorkerLost():
            return f"rank {event.rank} was lost ({event.reason})"
        case _:
            assert_never(event)


def _attempts_exhausted(request: Request, rank: int, reason: str) -> Failure:
    tries = request.suspicion.tries
    often = f"workers died {tries} times in a row under this request" if tries > 1 else "its worker died"
    limit = f"max_attempts is {request.limits.max_attempts}"
    if rank in request.suspicion.alone_on:
        message = (
            f"{often}, the last time with nothing else beside it: {reason}; {limit}, so it is not tried again"
        )
        return Failure(code="poison_request", message=message)
    return Failure(code="worker_lost", message=f"{often}: {reason}; {limit}")


def _deadline_failure(request: Request, event: DeadlinePassed) -> Failure:
    if event.step is None:
        message = f"not done {request.submission.timeout_s:g} s after it was submitted (timeout_s)"
    else:
        step = request.step(event.step)
        assert step is not None
        limit_s = sum(request.limits.walk_timeouts_s[name] for name in step.walks)
        message = f"step {event.step} ({' then '.join(step.walks)}) took longer than {limit_s:g} s"
    return Failure(code="deadline_exceeded", message=message, status=504)


def _step_of(key: str | None, request_id: str) -> int | None:
    """The step that made a tensor, from its key `request/attempt/step/...`; None for other keys."""
    match (key or "").split("/"):
        case [of, _, step, *_] if of == request_id and step.isdecimal() and len(step) <= _INDEX_DIGITS:
            return int(step)
        case _:
            return None
