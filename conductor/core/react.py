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
from conductor.core.request import Decision, Request, Running, World, chained, confirmed, decided, same
from shared.errors import BugError, DalSegnoError, Divergence
from shared.events import (
    Failure,
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
    encode,
)
from shared.models.base import ModelGraph
from shared.plans import Finish, Journey, PlanRequest, StepResult, Walk

_STAMP_BYTES: Final = 64
"""What writer, number and epoch add when a decision is published."""

Fact = RequestCancel | WalkCompleted | WalkFailed | WorkerJoined


class Reaction(msgspec.Struct, frozen=True):
    """The state after an event, and the decisions to put into the log because of it, in order."""

    request: Request
    decisions: tuple[Decision, ...] = ()


class _Step(msgspec.Struct, frozen=True):
    """One step of a plan, and the rank that hosts its walks."""

    walks: tuple[Walk, ...]
    rank: int


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
                result = StepResult(tuple(event.results), event.output)
                request = msgspec.structs.replace(request, results=(*request.results, result), running=None)
                return self._advance(request, world)
            case WalkFailed():
                return self._end(request, failed(request, event.failure))
            case RequestCancel():
                return self._cancel(request, event.reason)
            case WorkerJoined():
                return self._rejoin(request, event.rank, world)
            case _:
                assert_never(event)

    def _cancel(self, request: Request, reason: str) -> Reaction:
        decisions: list[Decision] = []
        if request.running and request.running.incarnation is not None:
            decisions.append(_stop(request, request.running, reason))
        decisions.append(
            RequestCancelled(
                id=_end_id(request),
                **_about(request),
                reason=reason,
            )
        )
        return self._end(request, *decisions)

    def _rejoin(self, request: Request, rank: int, world: World) -> Reaction:
        """The rank this request runs on has begun a new life: the step starts again there."""
        running = request.running
        assert running is not None
        step = self._next_step(request)
        if not isinstance(step, _Step):
            message = f"the plan goes on otherwise than before, from the same results: {step}"
            return self._end(request, failed(request, Failure(code=Divergence.code, message=message)))
        if running.incarnation is None:
            return self._dispatch(request, step, world)
        if request.attempt >= request.limits.max_attempts:
            message = (
                f"rank {rank} died {request.attempt} times under this request, "
                f"which is as often as it is tried (max_attempts {request.limits.max_attempts})"
            )
            return self._end(request, failed(request, Failure(code="worker_lost", message=message)))
        request = msgspec.structs.replace(request, attempt=request.attempt + 1)
        reason = (
            f"rank {rank} began a new life ({world.incarnation(rank)}) before step {running.index} was done"
        )
        fence = OutputFence(
            id=f"{request.id}.fence.{request.attempt}",
            **_about(request),
            reason=reason,
        )
        reaction = self._dispatch(decided(request, fence), step, world, why=reason)
        return Reaction(reaction.request, (fence, *reaction.decisions))

    # ---- the plan ----------------------------------------------------------------------------------
    def _advance(self, request: Request, world: World) -> Reaction:
        """Ask the plan what follows the results there are."""
        step = self._next_step(request)
        if isinstance(step, Failure):
            return self._end(request, failed(request, step))
        if isinstance(step, Finish):
            return self._end(request, _finished(request, step))
        return self._dispatch(request, step, world)

    def _next_step(self, request: Request) -> _Step | Finish | Failure:
        try:
            step = self._journey(request).advance(list(enumerate(request.results)))
            if isinstance(step, Finish):
                return step
            if len(step) != 1:
                raise BugError("one step at a time is what this version dispatches")
            walks = step[0].walks
            assert request.admitted is not None
            return _Step(walks, self._rank_of(walks, request.admitted))
        except DalSegnoError as error:
            return Failure(code=error.failure_code, message=error.message, status=error.failure_status)
        except Exception as error:  # noqa: BLE001 - a plan is the model's code: its bug ends its own request
            message = f"the plan failed: {type(error).__name__}: {error}"
            return Failure(code="internal_error", message=message)

    def _rank_of(self, walks: tuple[Walk, ...], admitted: RequestAdmitted) -> int:
        graph = self._graph_of(admitted.family)
        unknown = [walk.name for walk in walks if walk.name not in graph.walks]
        if unknown:
            raise BugError(f"the plan asks for the walks {unknown}; there are {sorted(graph.walks)}")
        ranks = {admitted.placement[node] for walk in walks for node in graph.walks[walk.name].nodes}
        if len(ranks) != 1:
            raise BugError(f"a step runs on one rank in this version; its nodes are on {sorted(ranks)}")
        return ranks.pop()

    def _dispatch(self, request: Request, step: _Step, world: World, why: str | None = None) -> Reaction:
        """Send the step at hand to its rank, or let it wait while the rank is away."""
        admitted, index, rank = request.admitted, len(request.results), step.rank
        assert admitted is not None
        incarnation = world.incarnation(rank)
        request = msgspec.structs.replace(
            request, running=Running(index=index, rank=rank, incarnation=incarnation)
        )
        if incarnation is None:
            return Reaction(request)
        names = " then ".join(walk.name for walk in step.walks)
        ready = NodeReady(
            id=f"{request.id}.ready.{request.attempt}.{index}.{rank}",
            **_about(request),
            incarnation=incarnation,
            index=index,
            rank=rank,
            model=request.submission.model,
            walks=[walk.call() for walk in step.walks],
            placement=admitted.placement,
            origin=request.submission.origin,
            seed=admitted.seed,
            reason=why or f"the plan's step {index} is {names}",
        )
        if failure := _too_large(ready, request.limits.max_event_bytes):
            return self._end(request, failed(request, failure))
        return Reaction(decided(request, ready), (ready,))

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
        self._journeys.pop(request.id, None)
        return Reaction(decided(request, *decisions), decisions)

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
    """Whether a fact is about the step at hand (or about the request as a whole)."""
    running = request.running
    match event:
        case WalkCompleted() | WalkFailed():
            return running is not None and (event.attempt, event.index, event.rank, event.incarnation) == (
                request.attempt,
                running.index,
                running.rank,
                running.incarnation,
            )
        case WorkerJoined():
            return running is not None and running.rank == event.rank
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
        output=request.results[-1].output,
    )


def _stop(request: Request, running: Running, reason: str) -> WalkStop:
    return WalkStop(
        id=f"{request.id}.stop.{request.attempt}.{running.index}.{running.rank}",
        **_about(request),
        incarnation=running.incarnation,
        index=running.index,
        rank=running.rank,
        reason=reason,
    )
