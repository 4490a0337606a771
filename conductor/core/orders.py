"""Construction of decisions about a request, and merging of the reports of its ranks into one result."""

from typing import Any, Final

import msgspec

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

COUNTS: Final = "counts"
"""The fact of what programs have counted, such as forward passes (`models.programs.Driver`)."""
_STAMP_BYTES: Final = 64
"""Bytes that writer, number and epoch add when a decision is published."""


# ---- orders to ranks -----------------------------------------------------------------------------


def order(
    request: Request, step: PendingStep, rank: int, incarnations: dict[int, int], why: str | None
) -> NodeReady:
    """The order of one step for one rank. It contains the whole step and the `incarnations` of all ranks."""
    admitted = request.admitted
    assert admitted is not None
    names = " then ".join(walk.name for walk in step.walks)
    whose = f"{step.partition}'s" if step.partition else "the plan's"
    return NodeReady(
        id=f"{request.id}.ready.{request.attempt}.{step.index}.{rank}",
        **_about(request),
        incarnation=incarnations[rank],
        index=step.index,
        rank=rank,
        model=request.submission.model,
        walks=[walk.call() for walk in step.walks],
        placement=request.placement,
        walk_placement=request.walk_placement,
        lives=incarnations if len(incarnations) > 1 else {},
        partition=step.partition,
        ends=list(step.ends),
        on_probation=is_quarantined(request),
        weights_since=request.weights_since,
        priority=request.submission.priority,
        tenant=request.tenant,
        deadline_ns=request.deadline_ns,
        cache_salt=request.submission.params.cache_salt,
        adapter=admitted.adapter,
        origin=request.submission.origin,
        seed=admitted.seed,
        reason=why or f"{whose} step {step.index} is {names}",
    )


def is_quarantined(request: Request) -> bool:
    """Tell whether ranks must report the begin of a step: the request is a suspect and not proven harmless.

    This includes the steps before the one that was running: if a worker dies before that step begins, the
    step is not the cause.
    """
    return bool(request.suspicion.required_progress)


def too_large(ready: NodeReady, max_event_bytes: int) -> Failure | None:
    """The error of an order above the log's limit. Its size depends on the client's input."""
    size = len(encode(ready)) + _STAMP_BYTES
    if not max_event_bytes or size <= max_event_bytes:
        return None
    message = (
        f"step {ready.index} of this request needs an event of {size} bytes, but the log takes "
        f"{max_event_bytes}; send less, or raise the server's max_payload"
    )
    return Failure(code="payload_too_large", message=message, status=413)


def stop(request: Request, step: Running, rank: int, reason: str) -> WalkStop:
    """The order to a rank to abandon a step."""
    return WalkStop(
        id=f"{request.id}.stop.{request.attempt}.{step.index}.{rank}",
        **_about(request),
        incarnation=step.incarnations[rank],
        index=step.index,
        rank=rank,
        reason=reason,
    )


def fence(request: Request, reason: str, lives: dict[str, int]) -> OutputFence:
    """The event that voids the chunks of attempts before the request's present one, written by `lives`."""
    name = f"{request.id}.fence.{request.attempt}"
    return OutputFence(id=name, **_about(request), reason=reason, lives=lives)


# ---- ends ----------------------------------------------------------------------------------------


def finished(request: Request, finish: Finish) -> RequestFinished:
    """The decision that ends a request whose plan returned."""
    usage = finish.usage
    if not usage.cached_tokens:  # what a plan counts itself is the result of a prompt computed in advance
        cached = min(request.cached_tokens, usage.prompt_tokens)  # a resumed answer may be cached as well
        usage = msgspec.structs.replace(usage, cached_tokens=cached)
    return RequestFinished(
        id=_end_id(request),
        **_about(request),
        usage=usage,
        finish_reasons=list(finish.finish_reasons),
        stop_reasons=list(finish.stop_reasons),
        output=combined(request.tracks),
    )


def failed(request: Request, failure: Failure) -> RequestFailed:
    """The decision that ends a request with an error."""
    return RequestFailed(id=_end_id(request), **_about(request), failure=failure)


def cancelled(request: Request, reason: str) -> RequestCancelled:
    """The decision that ends a cancelled request."""
    return RequestCancelled(id=_end_id(request), **_about(request), reason=reason)


def _end_id(request: Request) -> str:
    """The id of every kind of end. They share it because a request ends once."""
    return f"{request.id}.end"


def _about(request: Request) -> dict[str, Any]:
    """The fields that all decisions about a request share."""
    return {
        "request_id": request.id,
        "attempt": request.attempt,
        "history": request.history,
        "trace": request.submission.trace,
    }


# ---- reports of ranks ----------------------------------------------------------------------------


def grown(known: dict[str, OutputTotals], reported: dict[str, OutputTotals]) -> dict[str, OutputTotals]:
    """Merge one more report into the emitted output. Tracks only grow; shorter reports are ignored."""
    news = {
        name: totals
        for name, totals in reported.items()
        if totals != OutputTotals() and totals.chunks >= known.get(name, totals).chunks
    }
    return known | news


def merged(parts: dict[int, tuple[WalkResult, ...]]) -> tuple[WalkResult, ...] | str:
    """Merge the reports of a step's ranks, walk by walk; or return the reason why they conflict.

    What programs have counted on each rank is added up (`COUNTS`).
    """
    first, *others = sorted(parts)
    whole = parts[first]
    for rank in others:
        names, reported = [one.name for one in whole], [one.name for one in parts[rank]]
        if names != reported:
            return f"rank {first} reports the walks {names}, rank {rank} {reported}; expected the same"
        pairs = list(zip(whole, parts[rank], strict=True))
        for mine, other in pairs:
            if conflicting := _conflicting(mine, other):
                return (
                    f"walk {mine.name}: rank {rank} reports the {conflicting} otherwise than another rank; "
                    "expected each from one of them"
                )
        whole = tuple(_joined(mine, other) for mine, other in pairs)
    return whole


def _conflicting(mine: WalkResult, other: WalkResult) -> str:
    """The first fact or output that two ranks report with unlike values; empty if there is none."""
    counted = _summed_counts(mine.facts, other.facts)
    for name in sorted(mine.facts.keys() & other.facts.keys() - counted.keys()):
        if mine.facts[name] != other.facts[name]:
            return f"fact {name!r}"
    for name in sorted(mine.outputs.keys() & other.outputs.keys()):
        if mine.outputs[name] != other.outputs[name]:
            return f"output {name!r}"
    return ""


def _joined(mine: WalkResult, other: WalkResult) -> WalkResult:
    return WalkResult(
        name=mine.name,
        facts=mine.facts | other.facts | _summed_counts(mine.facts, other.facts),
        outputs=mine.outputs | other.outputs,
    )


def _summed_counts(facts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The sums of two ranks' counts in one walk, as a fact; empty unless both have counted."""
    mine, theirs = facts.get(COUNTS), others.get(COUNTS)
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return {}
    if not all(type(number) is int for number in (*mine.values(), *theirs.values())):
        return {}
    return {COUNTS: {what: mine.get(what, 0) + theirs.get(what, 0) for what in mine | theirs}}


def with_step(running: tuple[Running, ...], step: Running) -> tuple[Running, ...]:
    """Replace the state of one of the running steps."""
    return tuple(step if one.index == step.index else one for one in running)
