"""Coverage of simulated histories: how often each accident and reaction happened.

An accident that never happens proves nothing. A history's own counts (`Simulation.seen`) cover accidents and
what simulated processes noticed. This module adds what its log shows, and the amount that each invariant
examined.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from shared.epoch_fence import EpochFence
from shared.events import (
    DeadlinePassed,
    NodeReady,
    OutputFence,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
)
from tests.simulation.history import Past
from tests.simulation.invariants import INVARIANTS
from tests.simulation.plan import RATES

NOTICED: Final = (
    "a client comes back for the rest",
    "a client is attached to its request",
    "a client is told that its request is gone",
    "a client is told: output_changed",
    "a conductor begins with a snapshot",
    "a life that was given up joins again",
    "a medium comes out again as it was",
    "a medium comes out otherwise than before",
    "a process finds that the log went back",
    "a snapshot of another log is passed over",
    "a tensor is gone for no reason",
    "a tensor is made",
    "a worker finds output of another checkpoint",
    "a worker is declared lost, rightly",
    "a worker is declared lost, wrongly",
    "a record is delivered twice",
    "a record is lost on its way to a reader",
    "an answer is let go of, for its client is slow",
    "an event is lost",
    "an event is refused: the log is full",
    "an event is stored, and its ack lost",
)
RECORDED: Final = (
    "an event is stored twice",
    "an event of a deposed conductor is void",
    "an end: finished",
    "an end: cancelled",
    "an end: deadline_exceeded",
    "an end: poison_request",
    "an end: replay_divergence",
    "an end: tensor_gone",
    "an end: turned away",
    "an end: weights_changed",
    "an end: worker_lost",
    "a cancel comes too late",
    "a request goes on at another rank",
    "a request goes on where it was",
    "a request runs into its limit",
    "a step runs into its limit",
    "a suspect runs alone",
    "a suspect is further than it was",
    "a limit is said to be over too early",
    "a poison is found out",
    "an innocent is unlucky",
    "a request interrupted by a worker that leaves",
    "a request interrupted by a worker that is lost",
    "a request interrupted by a worker's next life",
    "a tensor is found gone",
    "a step is stopped",
    "a step has several ranks",
    "a report is of an attempt that is over",
)


def rows() -> list[str]:
    """Everything that has to happen in enough histories."""
    accidents = [f"accident: {name}" for name in RATES]
    return [*accidents, *NOTICED, *RECORDED, *(f"invariant: {one.__name__}" for one in INVARIANTS)]


def of(past: Past, looked_at: Counter[str]) -> Counter[str]:
    """The counts of one history, by row."""
    found = Counter(past.sim.seen)
    found.update({f"invariant: {name}": count for name, count in looked_at.items()})
    found.update(_recorded(past))
    return found


def _recorded(past: Past) -> Iterable[str]:
    log, fence = past.sim.log, EpochFence()
    yield from ("an event of a deposed conductor is void" for e in log.events if e and not fence.admits(e))
    ids = Counter(event.id for _, event in past.valid)
    yield from ("an event is stored twice" for count in ids.values() if count > 1)
    for request_id, ends in past.ends.items():
        for seq, end in ends.values():
            yield from _ended(past, request_id, seq, end)
    placements: dict[str | None, object] = {}
    attempts: Counter[str | None] = Counter()
    seen: set[str] = set()
    for seq, event in past.valid:
        if event.id in seen:
            continue
        seen.add(event.id)
        if isinstance(event, WalkCompleted) and event.attempt < attempts[event.request_id]:
            yield "a report is of an attempt that is over"
        attempts[event.request_id] = max(attempts[event.request_id], event.attempt)
        match event:
            case RequestResumed():
                before = placements.get(event.request_id)
                yield "a suspect runs alone" if event.alone_on else "a request goes on where it was"
                if before is not None and before != event.placement:
                    yield "a request goes on at another rank"
                placements[event.request_id] = event.placement
            case NodeReady():
                placements[event.request_id] = event.placement
                if event.lives:
                    yield "a step has several ranks"
            case WalkProgressed():
                yield "a suspect is further than it was"
            case WalkStop():
                yield "a step is stopped"
            case WalkFailed() if event.gone:
                yield "a tensor is found gone"
            case DeadlinePassed() if log.records[seq - 1].time_ns < event.deadline_ns:
                yield "a limit is said to be over too early"
            case OutputFence():
                yield from _interrupted(event)
            case _:
                pass


def _ended(past: Past, request_id: str, seq: int, end: object) -> Iterable[str]:
    if any(other > seq for other, _ in past.of_kind(RequestCancel, request_id)):
        yield "a cancel comes too late"
    match end:
        case RequestFinished():
            yield "an end: finished"
        case RequestCancelled():
            yield "an end: cancelled"
        case RequestFailed():
            code, is_poison = end.failure.code, request_id in past.sim.poisons
            yield f"an end: {code}"
            if code == "poison_request":
                yield "a poison is found out" if is_poison else "an innocent is unlucky"
            if code == "deadline_exceeded":
                whose = "a step" if end.failure.message.startswith("step") else "a request"
                yield f"{whose} runs into its limit"
        case RequestRejected():
            yield "an end: turned away"
        case _:
            raise AssertionError(end)


def _interrupted(fence: OutputFence) -> Iterable[str]:
    for words, how in {
        " left": "a worker that leaves",
        " was lost": "a worker that is lost",
        " began a new life": "a worker's next life",
    }.items():
        if words in fence.reason:
            yield f"a request interrupted by {how}"
