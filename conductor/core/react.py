"""`react`: what a request's state becomes by one event, and what is decided because of it.

Pure, and a function of this request's own log alone (and of the `World`, which is a fold of the log
too): so whoever folds the same log decides the same. Three kinds of event come in:

- *facts* (cancel, walk completed, worker joined, ...) lead to decisions, which are *expected* from then
  on until the log shows them;
- *decisions that depend on the world* (`request.admitted`, `request.rejected`): `schedule` made them,
  and here they are taken as facts, at their position in the log and not before;
- *recorded decisions of ours*: they are compared with what is expected. The same: confirmed. A second
  copy: nothing. Another: a `Divergence`.
"""

from collections.abc import Callable
from typing import Any, Final, assert_never

import msgspec

from conductor.core.lifecycle import FACTS
from conductor.core.request import (
    Decision,
    Request,
    Running,
    World,
    chained,
    confirmed,
    decided,
    ranks_of,
    same,
)
from shared.errors import BugError, DalSegnoError, Divergence, TensorGone
from shared.events import (
    Failure,
    NodeReady,
    OutputFence,
    OutputTotals,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WalkCompleted,
    WalkFailed,
    WalkResult,
    WalkStop,
    WorkerJoined,
    encode,
)
from shared.models.base import ModelGraph
from shared.placement import rank_of
from shared.plans import AtHand, Finish, Journey, PlanRequest, StepResult
from shared.transcript import combined

_STAMP_BYTES: Final = 64
"""What writer, number and epoch add when a decision is published."""
_INDEX_DIGITS: Final = 9

Fact = RequestCancel | WalkCompleted | WalkFailed | WorkerJoined


class Reaction(msgspec.Struct, frozen=True):
    """The state after an event, and the decisions to put into the log because of it, in order."""

    request: Request
    decisions: tuple[Decision, ...] = ()


class _Step(msgspec.Struct, frozen=True):
    """One step of a plan, and the ranks that host the nodes of its walks."""

    asked: AtHand
    ranks: tuple[int, ...]


class Reactor:
    """`react`, with the families' graphs at hand and a cache of running plans (rebuilt when missing)."""

    def __init__(self, graph_of: Callable[[str], ModelGraph]) -> None:
        self._graph_of = graph_of
        self._journeys: dict[str, Journey] = {}

    # ---- facts -------------------------------------------------------------------------------------
    def fact(self, request: Request, event: Fact, data: bytes, world: World) -> Reaction:
        """Fold one fact; `data` are its bytes in the log."""
        if type(event) not in FACTS.get(request.phase, ()) or not concerns(request, event):
            return Reaction(request)  # late, a duplicate, or another attempt's: kept, and nothing changes
        request = msgspec.structs.replace(request, history=chained(request.history, data))
        match event:
            case WalkCompleted():
                return self._done(request, event, world)
            case WalkFailed():
                return self._failed(request, event, world)
            case RequestCancel():
                return self._cancel(request, event.reason)
            case WorkerJoined():
                return self._rejoin(request, event.rank, world)
            case _:
                assert_never(event)

    def _done(self, request: Request, event: WalkCompleted, world: World) -> Reaction:
        """A rank has done its part of a step; the plan goes on when all of them have."""
        step = request.step(event.index)
        assert step is not None
        tracks = _grown(request.tracks, {"": event.output, **event.tracks})
        parts = step.parts | {event.rank: tuple(event.results)}
        if parts.keys() != step.lives.keys():
            running = tuple(
                msgspec.structs.replace(one, parts=parts) if one is step else one for one in request.running
            )
            return Reaction(msgspec.structs.replace(request, running=running, tracks=tracks))
        request = msgspec.structs.replace(request, tracks=tracks)
        results = _merged(parts)
        if isinstance(results, str):
            message = f"step {step.index}: {results}"
            return self._end(request, failed(request, Failure(code=BugError.code, message=message)))
        request = msgspec.structs.replace(
            request,
            results=(*request.results, (step.index, StepResult(results, combined(tracks)))),
            running=tuple(one for one in request.running if one is not step),
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
        behind = journey.before(producer)
        if behind is None:
            return self._end(request, failed(request, event.failure))
        if request.attempt >= request.limits.max_attempts:
            message = (
                f"{event.failure.message}; this was attempt {request.attempt} of "
                f"{request.limits.max_attempts} (max_attempts)"
            )
            failure = msgspec.structs.replace(event.failure, message=message)
            return self._end(request, failed(request, failure))
        reason = f"tensor {event.gone} is gone: step {producer}, which made it, runs again"
        return self._restart(request, journey.alone(behind), reason, world)

    def _cancel(self, request: Request, reason: str) -> Reaction:
        stops = [_stop(request, step, rank, reason) for step in request.running for rank in step.lives]
        cancelled = RequestCancelled(
            id=_end_id(request),
            **_about(request),
            reason=reason,
        )
        return self._end(request, *stops, cancelled)

    def _rejoin(self, request: Request, rank: int, world: World) -> Reaction:
        """A rank this request is placed on has begun a new life: what was sent out starts again."""
        if isinstance(otherwise := self._steps_again(request), Failure):
            return self._end(request, failed(request, otherwise))
        keep = self._journey(request).alone(len(request.results))
        sent = [step.index for step in request.running if step.lives]
        if not sent and keep == len(request.results):
            return self._go_on(request, world)  # nothing was under way
        if request.attempt >= request.limits.max_attempts:
            message = (
                f"rank {rank} died {request.attempt} times under this request, "
                f"which is as often as it is tried (max_attempts {request.limits.max_attempts})"
            )
            return self._end(request, failed(request, Failure(code="worker_lost", message=message)))
        steps = sent or [step.index for step in request.running]
        undone = f"step {steps[0]} was" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} were"
        reason = f"rank {rank} began a new life ({world.incarnation(rank)}) before {undone} done"
        return self._restart(request, keep, reason, world)

    def _restart(self, request: Request, keep: int, reason: str, world: World) -> Reaction:
        """Go back to where the first `keep` results led to, and on from there as the next attempt."""
        old = request
        request = msgspec.structs.replace(
            request, attempt=request.attempt + 1, results=request.results[:keep], running=()
        )
        fence = OutputFence(
            id=f"{request.id}.fence.{request.attempt}",
            **_about(request),
            reason=reason,
        )
        reaction = self._go_on(decided(request, fence), world, why=reason)
        request, orders = reaction.request, reaction.decisions
        if request.phase.ended:
            return Reaction(request, (fence, *orders))
        # A rank learns of the new attempt by its orders; one that has none now is told that the old is over.
        told = {order.rank for order in orders if isinstance(order, NodeReady)}
        stops = [
            _stop(old, step, rank, reason)
            for step in old.running
            for rank, life in step.lives.items()
            if rank not in told and world.incarnation(rank) == life
        ]
        return Reaction(decided(request, *stops), (fence, *orders, *stops))

    # ---- the plan ----------------------------------------------------------------------------------
    def _advance(self, request: Request, world: World) -> Reaction:
        """Ask the plan what follows the results there are."""
        steps = self._next_steps(request)
        if isinstance(steps, Failure):
            return self._end(request, failed(request, steps))
        if isinstance(steps, Finish):
            return self._end(request, _finished(request, steps))
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
        assert request.admitted is not None
        try:
            steps = self._journey(request).advance(request.results)
            if isinstance(steps, Finish):
                return steps
            return tuple(_Step(step, self._ranks_of(step, request.admitted)) for step in steps)
        except DalSegnoError as error:
            return Failure(code=error.failure_code, message=error.message, status=error.failure_status)
        except Exception as error:  # noqa: BLE001 - a plan is the model's code: its bug ends its own request
            message = f"the plan failed: {type(error).__name__}: {error}"
            return Failure(code="internal_error", message=message)

    def _ranks_of(self, step: AtHand, admitted: RequestAdmitted) -> tuple[int, ...]:
        graph = self._graph_of(admitted.family)
        unknown = [walk.name for walk in step.walks if walk.name not in graph.walks]
        if unknown:
            raise BugError(f"the plan asks for the walks {unknown}; there are {sorted(graph.walks)}")
        streams = {name for name, _ in graph.streams}
        if unknown := [name for name in step.ends if name not in streams]:
            raise BugError(f"the plan ends the streams {unknown}; there are {sorted(streams)}")
        ranks = {
            rank_of(admitted.placement, admitted.walk_placement, walk.name, node)
            for walk in step.walks
            for node in graph.walks[walk.name].nodes
        }
        return tuple(sorted(ranks))

    def _dispatch(
        self, request: Request, steps: tuple[_Step, ...], world: World, why: str | None = None
    ) -> Reaction:
        """Send the steps at hand, each to all of its ranks; or let them wait.

        They wait while any rank is away that the request is placed on: what began now would begin again
        when that one joins.
        """
        assert request.admitted is not None
        known = {step.index: step for step in request.running}
        lives = {rank: world.incarnation(rank) for rank in sorted(ranks_of(request.admitted))}
        there = {rank: life for rank, life in lives.items() if life is not None}
        running: list[Running] = []
        orders: list[NodeReady] = []
        for step in steps:
            index, partition = step.asked.index, step.asked.partition
            state = known.get(index) or Running(index=index, partition=partition)
            if not state.lives and len(there) == len(lives):
                state = Running(index=index, partition=partition, lives={r: there[r] for r in step.ranks})
                orders += [_order(request, step.asked, rank, there, why) for rank in step.ranks]
            running.append(state)
        for order in orders:
            if failure := _too_large(order, request.limits.max_event_bytes):
                return self._end(request, failed(request, failure))
        request = msgspec.structs.replace(request, running=tuple(running))
        return Reaction(decided(request, *orders), tuple(orders))

    def _journey(self, request: Request) -> Journey:
        journey = self._journeys.get(request.id)
        if journey is None:
            assert request.admitted is not None
            journey = self._journeys[request.id] = Journey(
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
    def recorded(self, request: Request, event: Decision, data: bytes, world: World) -> Reaction:
        """Fold one decision read from the log.

        Raises:
            Divergence: it is not what was decided here from the same facts; `request` is left as it was.
        """
        if event.id in request.recorded:
            return Reaction(request)  # a second copy of what is known
        if event.id in request.expected:
            return Reaction(self._confirm(request, event))
        match event:
            case RequestAdmitted():
                return self._admit(request, event, data, world)
            case RequestRejected():
                return self._reject(request, event, data)
            case _:
                raise Divergence(
                    f"request {request.id}: {event.id} is recorded, but the facts before it do not lead to it"
                )

    def _confirm(self, request: Request, event: Decision) -> Request:
        if not same(event, request.expected[event.id]):
            raise Divergence(f"request {request.id}: {event.id} is recorded otherwise than decided")
        return confirmed(request, event.id)

    def _admit(self, request: Request, event: RequestAdmitted, data: bytes, world: World) -> Reaction:
        if request.phase.ended:
            return Reaction(request)  # cancelled before the admission was stored
        if event.pins.submission != request.digest:
            raise Divergence(
                f"request {request.id}: admitted is {event.pins.submission}, submitted {request.digest}"
            )
        request = msgspec.structs.replace(
            request, history=chained(request.history, data), attempt=1, admitted=event
        )
        return self._advance(confirmed(decided(request, event), event.id), world)

    def _reject(self, request: Request, event: RequestRejected, data: bytes) -> Reaction:
        if request.phase.ended or event.submission_seq != request.submission_seq:
            return Reaction(request)  # it refuses another submission under this id
        request = msgspec.structs.replace(request, history=chained(request.history, data))
        return Reaction(confirmed(decided(request, event), event.id))


def _order(request: Request, step: AtHand, rank: int, lives: dict[int, int], why: str | None) -> NodeReady:
    """What one of a step's ranks is told: all of the step; `lives` are those of the request's ranks."""
    admitted = request.admitted
    assert admitted is not None
    names = " then ".join(walk.name for walk in step.walks)
    whose = f"{step.partition}'s" if step.partition else "the plan's"
    return NodeReady(
        id=f"{request.id}.ready.{request.attempt}.{step.index}.{rank}",
        **_about(request),
        incarnation=lives[rank],
        index=step.index,
        rank=rank,
        model=request.submission.model,
        walks=[walk.call() for walk in step.walks],
        placement=admitted.placement,
        walk_placement=admitted.walk_placement,
        lives=lives if len(lives) > 1 else {},
        partition=step.partition,
        ends=list(step.ends),
        origin=request.submission.origin,
        seed=admitted.seed,
        reason=why or f"{whose} step {step.index} is {names}",
    )


def _grown(known: dict[str, OutputTotals], reported: dict[str, OutputTotals]) -> dict[str, OutputTotals]:
    """What is put out, after one more report. Tracks only grow: who reports less has not written there."""
    news = {
        name: totals
        for name, totals in reported.items()
        if totals != OutputTotals() and totals.chunks >= known.get(name, totals).chunks
    }
    return known | news


def _merged(parts: dict[int, tuple[WalkResult, ...]]) -> tuple[WalkResult, ...] | str:
    """What the ranks' parts of a step come to together, walk by walk; or why they are no whole."""
    ranks = sorted(parts)
    merged = parts[ranks[0]]
    for rank in ranks[1:]:
        names, others = [one.name for one in merged], [one.name for one in parts[rank]]
        if names != others:
            return f"rank {ranks[0]} reports the walks {names}, rank {rank} {others}; expected the same"
        for mine, other in zip(merged, parts[rank], strict=True):
            told: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
                ("fact", mine.facts, other.facts),
                ("output", mine.outputs, other.outputs),
            ]
            for what, known, new in told:
                if twice := sorted(name for name in known.keys() & new.keys() if known[name] != new[name]):
                    return (
                        f"walk {mine.name}: rank {rank} reports the {what} {twice[0]!r} otherwise than "
                        "another rank; expected each from one of them"
                    )
        merged = tuple(
            WalkResult(name=mine.name, facts=mine.facts | other.facts, outputs=mine.outputs | other.outputs)
            for mine, other in zip(merged, parts[rank], strict=True)
        )
    return merged


def _step_of(key: str | None, request_id: str) -> int | None:
    """The step that made a tensor, of its key `request/attempt/step/...`; None for one of another kind."""
    match (key or "").split("/"):
        case [of, _, step, *_] if of == request_id and step.isdecimal() and len(step) <= _INDEX_DIGITS:
            return int(step)
        case _:
            return None


def _too_large(ready: NodeReady, max_event_bytes: int) -> Failure | None:
    """Why an order cannot be stored. It repeats what the client wrote, so it may outgrow the submission."""
    size = len(encode(ready)) + _STAMP_BYTES
    if not max_event_bytes or size <= max_event_bytes:
        return None
    message = (
        f"step {ready.index} of this request needs an event of {size} bytes, but the log takes "
        f"{max_event_bytes}; send less, or raise the server's max_payload"
    )
    return Failure(code="payload_too_large", message=message, status=413)


def concerns(request: Request, event: Fact) -> bool:
    """Whether a fact is about a step at hand (or about the request as a whole)."""
    match event:
        case WalkCompleted() | WalkFailed():
            step = request.step(event.index)
            return (
                step is not None
                and event.attempt == request.attempt
                and event.rank in step.lives
                and event.rank not in step.parts
                and event.incarnation == step.lives[event.rank]
            )
        case WorkerJoined():
            return request.admitted is not None and event.rank in ranks_of(request.admitted)
        case RequestCancel():
            return True
        case _:
            assert_never(event)


def _about(request: Request) -> dict[str, Any]:
    """What every decision about a request says of it."""
    return {
        "request_id": request.id,
        "attempt": request.attempt,
        "history": request.history,
        "trace": request.submission.trace,
    }


def _end_id(request: Request) -> str:
    """All ends share one id: a request ends once, however it ends."""
    return f"{request.id}.end"


def failed(request: Request, failure: Failure) -> RequestFailed:
    """The decision that ends a request with an error."""
    return RequestFailed(
        id=_end_id(request),
        **_about(request),
        failure=failure,
    )


def _finished(request: Request, finish: Finish) -> RequestFinished:
    return RequestFinished(
        id=_end_id(request),
        **_about(request),
        usage=finish.usage,
        finish_reasons=list(finish.finish_reasons),
        output=combined(request.tracks),
    )


def _stop(request: Request, step: Running, rank: int, reason: str) -> WalkStop:
    return WalkStop(
        id=f"{request.id}.stop.{request.attempt}.{step.index}.{rank}",
        **_about(request),
        incarnation=step.lives[rank],
        index=step.index,
        rank=rank,
        reason=reason,
    )
