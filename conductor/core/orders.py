"""How decisions about a request are put together, and its ranks' reports put together to one result."""

from typing import Any, Final

from conductor.core.request import Request, Running
from shared.events import (
    Failure,
    NodeReady,
    OutputFence,
    OutputTotals,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    WalkResult,
    WalkStop,
    encode,
)
from shared.plan_run import PendingStep
from shared.plans import Finish
from shared.transcript import combined

_STAMP_BYTES: Final = 64
"""What writer, number and epoch add when a decision is published."""


# ---- what ranks are told -------------------------------------------------------------------------


def order(request: Request, step: PendingStep, rank: int, lives: dict[int, int], why: str | None) -> NodeReady:
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
        placement=request.placement,
        walk_placement=request.walk_placement,
        lives=lives if len(lives) > 1 else {},
        partition=step.partition,
        ends=list(step.ends),
        on_probation=is_on_probation(request),
        priority=request.submission.priority,
        tenant=request.tenant,
        deadline_ns=request.deadline_ns,
        origin=request.submission.origin,
        seed=admitted.seed,
        reason=why or f"{whose} step {step.index} is {names}",
    )


def is_on_probation(request: Request) -> bool:
    """Whether its ranks are to say what they begin: workers died under it, and it is not proven.

    Also of a step before the one that was under way: who dies before it began did not die of it.
    """
    return bool(request.suspicion.hurdles)


def too_large(ready: NodeReady, max_event_bytes: int) -> Failure | None:
    """Why an order cannot be stored. It repeats what the client wrote, so it may outgrow the submission."""
    size = len(encode(ready)) + _STAMP_BYTES
    if not max_event_bytes or size <= max_event_bytes:
        return None
    message = (
        f"step {ready.index} of this request needs an event of {size} bytes, but the log takes "
        f"{max_event_bytes}; send less, or raise the server's max_payload"
    )
    return Failure(code="payload_too_large", message=message, status=413)


def stop(request: Request, step: Running, rank: int, reason: str) -> WalkStop:
    """A rank's order to leave a step."""
    return WalkStop(
        id=f"{request.id}.stop.{request.attempt}.{step.index}.{rank}",
        **_about(request),
        incarnation=step.lives[rank],
        index=step.index,
        rank=rank,
        reason=reason,
    )


def fence(request: Request, reason: str) -> OutputFence:
    """What voids chunks of the attempts before the request's present one."""
    return OutputFence(id=f"{request.id}.fence.{request.attempt}", **_about(request), reason=reason)


# ---- ends ----------------------------------------------------------------------------------------


def finished(request: Request, finish: Finish) -> RequestFinished:
    """The plan returned."""
    return RequestFinished(
        id=_end_id(request),
        **_about(request),
        usage=finish.usage,
        finish_reasons=list(finish.finish_reasons),
        output=combined(request.tracks),
    )


def failed(request: Request, failure: Failure) -> RequestFailed:
    """The decision that ends a request with an error."""
    return RequestFailed(id=_end_id(request), **_about(request), failure=failure)


def cancelled(request: Request, reason: str) -> RequestCancelled:
    """The decision that ends a request nobody wants."""
    return RequestCancelled(id=_end_id(request), **_about(request), reason=reason)


def _end_id(request: Request) -> str:
    """All ends share one id: a request ends once, however it ends."""
    return f"{request.id}.end"


def _about(request: Request) -> dict[str, Any]:
    """What every decision about a request says of it."""
    return {
        "request_id": request.id,
        "attempt": request.attempt,
        "history": request.history,
        "trace": request.submission.trace,
    }


# ---- what ranks report ---------------------------------------------------------------------------


def grown(known: dict[str, OutputTotals], reported: dict[str, OutputTotals]) -> dict[str, OutputTotals]:
    """What is put out, after one more report. Tracks only grow: who reports less has not written there."""
    news = {
        name: totals
        for name, totals in reported.items()
        if totals != OutputTotals() and totals.chunks >= known.get(name, totals).chunks
    }
    return known | news


def merged(parts: dict[int, tuple[WalkResult, ...]]) -> tuple[WalkResult, ...] | str:
    """What the ranks' parts of a step come to together, walk by walk; or why they are no whole."""
    ranks = sorted(parts)
    whole = parts[ranks[0]]
    for rank in ranks[1:]:
        names, others = [one.name for one in whole], [one.name for one in parts[rank]]
        if names != others:
            return f"rank {ranks[0]} reports the walks {names}, rank {rank} {others}; expected the same"
        for mine, other in zip(whole, parts[rank], strict=True):
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
        whole = tuple(
            WalkResult(name=mine.name, facts=mine.facts | other.facts, outputs=mine.outputs | other.outputs)
            for mine, other in zip(whole, parts[rank], strict=True)
        )
    return whole


def with_step(running: tuple[Running, ...], step: Running) -> tuple[Running, ...]:
    """The steps that are out, after something is known of one of them."""
    return tuple(step if one.index == step.index else one for one in running)
