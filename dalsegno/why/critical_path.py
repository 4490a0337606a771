"""The critical path of a request: at each time between its submission and its end, what it waited for. Pure.

The time is swept once, from the submission on:

    wait for admission │ attempt 1: steps, and the conductor between them │ away │ attempt 2: ... │ end

While several steps run (sub-plans), the one that reports last is critical. The parts follow one another
without gaps, so their durations add up to the whole time exactly.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from dalsegno.history.summary import Summary
from dalsegno.why.parts import Kind, Part, named, parts_of_step
from dalsegno.why.request_facts import Incarnation, RequestFacts, Step, Stored
from shared.events import (
    DeadlinePassed,
    EpochOpened,
    NodeReady,
    OutputFence,
    RequestAdmitted,
    RequestFailed,
    RequestResumed,
    WalkCompleted,
    WorkerLost,
)

_NAMED: Final = 8
"""The most requests that a part names."""
_SOON_NS: Final = 10_000_000
"""An admission after less than this did not wait for a place."""


def critical_path(facts: RequestFacts, neighbours: Sequence[Summary], until_ns: int) -> list[Part]:
    """Return the parts of a request's time, in order.

    Args:
        facts: the request.
        neighbours: other requests, to name those that it waited for.
        until_ns: its end, or now if it is open; Unix nanoseconds.
    """
    begin_ns = facts.submitted_ns
    path = _Path(facts, neighbours, max(until_ns, begin_ns))
    return [
        msgspec.structs.replace(part, begin_ns=part.begin_ns - begin_ns, end_ns=part.end_ns - begin_ns)
        for part in _joined(path.parts())
        if part.end_ns > part.begin_ns
    ]


def _joined(parts: Iterator[Part]) -> Iterator[Part]:
    """Join parts that follow one another and say the same."""
    last: Part | None = None
    for part in parts:
        if last is not None and (last.kind, last.text, last.end_ns) == (part.kind, part.text, part.begin_ns):
            last = msgspec.structs.replace(last, end_ns=part.end_ns)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


class _Path:
    """The sweep; times of its parts are those of the log."""

    def __init__(self, facts: RequestFacts, neighbours: Sequence[Summary], until_ns: int) -> None:
        self._facts = facts
        self._neighbours = neighbours
        self._until_ns = until_ns

    def parts(self) -> Iterator[Part]:
        """Yield all parts, in order."""
        facts, until_ns = self._facts, self._until_ns
        admitted_ns = facts.admitted.time_ns if facts.admitted is not None else until_ns
        yield from self._admission(facts.submitted_ns, admitted_ns)
        at_ns = admitted_ns
        fences = [mark for mark in facts.marks if isinstance(mark.event, OutputFence)]
        for fence in fences:
            lost = self._lost_before(fence)
            stop_ns = self._stop_ns(lost, fence, at_ns)
            yield from self._attempt(fence.event.attempt - 1, at_ns, stop_ns, fence)
            resumed = self._resumed_after(fence)
            resumed_ns = resumed.time_ns if resumed is not None else self._ordered_after(fence)
            yield from self._away(lost, fence, stop_ns, resumed_ns)
            at_ns = resumed_ns
        end = facts.end
        lost = self._lost_before(end) if end is not None and isinstance(end.event, RequestFailed) else None
        if lost is None or end is None:
            yield from self._attempt(facts.attempts, at_ns, until_ns, None)
            return
        stop_ns = self._stop_ns(lost, end, at_ns)
        yield from self._attempt(end.event.attempt, at_ns, stop_ns, end)
        yield from self._away(lost, end, stop_ns, until_ns)

    def _stop_ns(self, lost: Incarnation | None, fence: Stored, begin_ns: int) -> int:
        """The time at which the attempt before a fence stopped: with the worker that was lost, if one was."""
        stop_ns = fence.time_ns if lost is None else min(self._died_ns(lost, fence), fence.time_ns)
        return max(begin_ns, stop_ns)

    # ---- attempts ----------------------------------------------------------------------------------
    def _attempt(self, attempt: int, begin_ns: int, stop_ns: int, fence: Stored | None) -> Iterator[Part]:
        """Yield the steps of an attempt that a fence ended, or that is the last one."""
        steps = sorted(
            (step for step in self._facts.steps.values() if step.attempt == attempt),
            key=lambda step: step.first.seq,
        )
        at_ns = begin_ns
        while at_ns < stop_ns:
            running = [step for step in steps if step.first.ordered_ns <= at_ns < _reported_ns(step, stop_ns)]
            if not running:
                later = [step.first.ordered_ns for step in steps if step.first.ordered_ns > at_ns]
                next_ns = min([*later, stop_ns])
                yield from self._deciding(at_ns, next_ns, is_last=not later)
                at_ns = next_ns
                continue
            step = max(running, key=lambda one: (_reported_ns(one, stop_ns), -one.first.seq))
            end_ns = _reported_ns(step, stop_ns)
            if fence is not None and not 0 < step.last_seq < fence.seq:
                yield _lost_part(step, at_ns, end_ns)
            else:
                yield from self._step(step, at_ns, end_ns)
            at_ns = end_ns

    def _step(self, step: Step, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the parts of a step between two times; `begin_ns` is later than its order if others ran."""
        if not any(isinstance(order.report, WalkCompleted) or order.work for order in step.orders.values()):
            text = f"step {step.index} ({step.walks}) ran, and has reported nothing"
            yield Part(
                kind=Kind.RUNNING,
                begin_ns=begin_ns,
                end_ns=end_ns,
                text=text,
                rank=step.first.ready.rank,
                step=step.index,
                attempt=step.attempt,
            )
            return
        for part in parts_of_step(step, step.first.ordered_ns, end_ns, self._producers(step)):
            if part.end_ns > begin_ns:
                yield msgspec.structs.replace(part, begin_ns=max(part.begin_ns, begin_ns))

    def _producers(self, step: Step) -> dict[str, Step]:
        """The concurrent steps that make items for a step of a sub-plan, by stream."""
        if not step.first.ready.partition:
            return {}
        return {
            stream: one
            for one in self._facts.steps.values()
            if one is not step and one.attempt == step.attempt
            for stream in one.first.ready.ends
        }

    def _deciding(self, begin_ns: int, end_ns: int, *, is_last: bool) -> Iterator[Part]:
        """Yield the time between a fact and the decision that follows; a new leader has to come first."""
        text = "the conductor ends the request" if is_last else "the conductor decides on the next step"
        opened = [one for one in self._facts.epochs if begin_ns < one.time_ns < end_ns]
        if opened:
            leads_ns = opened[-1].time_ns
            yield Part(
                kind=Kind.NO_CONDUCTOR, begin_ns=begin_ns, end_ns=leads_ns, text=_new_leader(opened[-1])
            )
            begin_ns = leads_ns
        yield Part(kind=Kind.CONDUCTOR, begin_ns=begin_ns, end_ns=end_ns, text=text)

    # ---- between attempts --------------------------------------------------------------------------
    def _lost_before(self, fence: Stored) -> Incarnation | None:
        """The incarnation whose end a fence, or a failure, follows: the last of the request's that ended."""
        attempt = fence.event.attempt - isinstance(fence.event, OutputFence)
        used = {
            order.ready.incarnation
            for step in self._facts.steps.values()
            if step.attempt <= attempt
            for order in step.orders.values()
        }
        ended = {
            seq: one
            for one in self._facts.incarnations.values()
            if one.seq in used
            for seq in self._ends(one)
            if seq < fence.seq
        }
        if not ended:
            return None
        last = max(ended)
        earlier = [
            mark.seq
            for mark in self._facts.marks
            if mark.seq < fence.seq and not isinstance(mark.event, DeadlinePassed)
        ]
        return ended[last] if last > max(earlier, default=0) else None

    def _ends(self, one: Incarnation) -> Iterator[int]:
        """The positions of records by which an incarnation is over."""
        later = self._facts.successor(one)
        yield from (stored.seq for stored in (one.lost, one.left) if stored is not None)
        if later is not None:
            yield later.seq

    def _died_ns(self, lost: Incarnation, fence: Stored) -> int:
        """The time at which an incarnation stopped to work, as far as it is known."""
        end = self._facts.process_end(lost)
        if end is not None and not end.reason:
            return end.ended_ns
        if lost.lost is not None and isinstance(lost.lost.event, WorkerLost):
            return lost.lost.time_ns - round(lost.lost.event.silent_s * 1e9)
        return fence.time_ns

    def _resumed_after(self, fence: Stored) -> Stored | None:
        found = (
            mark
            for mark in self._facts.marks
            if isinstance(mark.event, RequestResumed) and mark.seq > fence.seq
        )
        return next(found, None)

    def _ordered_after(self, fence: Stored) -> int:
        """The time of the first order of a fence's attempt; the end if there is none."""
        orders = (
            step.first.ordered_ns
            for step in self._facts.steps.values()
            if step.attempt >= fence.event.attempt and step.first.seq > fence.seq
        )
        return min(orders, default=self._until_ns)

    def _away(self, lost: Incarnation | None, fence: Stored, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the time after an attempt: until a loss is noticed, until the rank is back, and the rest."""
        if lost is None:
            reason = fence.event.reason if isinstance(fence.event, OutputFence) else ""
            yield Part(kind=Kind.CONDUCTOR, begin_ns=begin_ns, end_ns=end_ns, text=reason)
            return
        later = self._facts.successor(lost)
        rank, how = lost.rank, self._how(lost)
        noticed_ns = min(fence.time_ns, end_ns)
        yield Part(
            kind=Kind.SILENT,
            begin_ns=begin_ns,
            end_ns=noticed_ns,
            text=f"rank {rank} was gone ({how}), and this was not known yet",
            rank=rank,
        )
        back_ns = noticed_ns
        if later is not None and noticed_ns < later.joined_ns <= end_ns:
            back_ns = later.joined_ns
            text = f"without rank {rank} ({how}): its process started and loaded the model"
            yield Part(kind=Kind.AWAY, begin_ns=noticed_ns, end_ns=back_ns, text=text, rank=rank)
        resumed = self._resumed_after(fence)
        reason = (
            resumed.event.reason if resumed is not None and isinstance(resumed.event, RequestResumed) else ""
        )
        text = reason or f"the request waits for a place without rank {rank} ({how})"
        kind = Kind.CONDUCTOR if reason else Kind.AWAY
        yield Part(kind=kind, begin_ns=back_ns, end_ns=end_ns, text=text, rank=None if reason else rank)

    def _how(self, lost: Incarnation) -> str:
        """How an incarnation ended, in words."""
        end = self._facts.process_end(lost)
        reasons = []
        if end is not None:
            reasons.append(end.how + (f" because {end.reason}" if end.reason else ""))
            if end.last_line and not end.signal:
                reasons.append(f"its last line: {end.last_line}")
        if lost.lost is not None and isinstance(lost.lost.event, WorkerLost):
            reasons.append(lost.lost.event.reason)
        if lost.left is not None:
            reasons.append("it shut down")
        return "; ".join(reasons) or "its process ended"

    # ---- admission ---------------------------------------------------------------------------------
    def _admission(self, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the wait for admission: for ranks, for a conductor, or behind other requests."""
        facts = self._facts
        at_ns = begin_ns
        opened = [one for one in facts.epochs if begin_ns < one.time_ns <= end_ns]
        if opened:
            at_ns = opened[-1].time_ns
            yield Part(kind=Kind.NO_CONDUCTOR, begin_ns=begin_ns, end_ns=at_ns, text=_new_leader(opened[-1]))
        joined = [one for one in facts.incarnations.values() if at_ns < one.joined_ns <= end_ns]
        placed = self._placed_on()
        if needed := [one for one in joined if one.seq in placed]:
            last = max(needed, key=lambda one: one.joined_ns)
            text = f"rank {last.rank} was not there: its process started and loaded the model"
            yield Part(kind=Kind.AWAY, begin_ns=at_ns, end_ns=last.joined_ns, text=text, rank=last.rank)
            at_ns = last.joined_ns
        ahead = self._ahead(at_ns, end_ns)
        admitted = facts.admitted.event if facts.admitted is not None else None
        reason = admitted.reason if isinstance(admitted, RequestAdmitted) else ""
        why = f" ({reason})" if reason else ""
        if ahead:
            text = f"it waited for a place behind {named(ahead[:_NAMED], len(ahead))}{why}"
        else:
            text = f"the conductor admits the request{why}" if reason else "it waits for admission"
        yield Part(
            kind=Kind.ADMISSION if ahead else Kind.CONDUCTOR,
            begin_ns=at_ns,
            end_ns=end_ns,
            text=text,
            requests=ahead[:_NAMED],
        )

    def _placed_on(self) -> set[int | None]:
        """The incarnations that the request's first attempt was ordered from."""
        orders = (
            order.ready
            for step in self._facts.steps.values()
            if step.attempt == 1
            for order in step.orders.values()
        )
        found: set[int | None] = set()
        for ready in orders:
            assert isinstance(ready, NodeReady)
            found |= {ready.incarnation, *ready.lives.values()}
        return found

    def _ahead(self, begin_ns: int, end_ns: int) -> list[str]:
        """The requests that had the places: those that were open, if the end of one of them made room.

        An admission without a wait takes a few milliseconds, and then others may end by coincidence.
        """
        if end_ns - begin_ns < _SOON_NS:
            return []
        placed = [
            (one.end_ns or end_ns, one.request_id)
            for one in self._neighbours
            if one.admitted_ns is not None
            and one.admitted_ns < end_ns
            and (one.end_ns is None or one.end_ns > begin_ns)
        ]
        has_room = any(ended_ns < end_ns for ended_ns, _ in placed)
        return [request_id for _, request_id in sorted(placed)] if has_room else []


def _reported_ns(step: Step, stop_ns: int) -> int:
    """The time of a step's last report; the end of its attempt while a rank has not reported."""
    times = [order.reported_ns for order in step.orders.values()]
    return min(stop_ns, max(stop_ns if one is None else one for one in times))


def _lost_part(step: Step, begin_ns: int, end_ns: int) -> Part:
    text = f"step {step.index} ({step.walks}) ran in attempt {step.attempt}, which ended before it reported"
    return Part(
        kind=Kind.LOST,
        begin_ns=begin_ns,
        end_ns=end_ns,
        text=text,
        rank=step.first.ready.rank,
        step=step.index,
        attempt=step.attempt,
    )


def _new_leader(opened: Stored) -> str:
    """Why there was no leader, as far as a conductor's epoch says."""
    event = opened.event
    assert isinstance(event, EpochOpened)
    last = event.ended[-1] if event.ended else None
    how = "" if last is None else f", which was {last.how}" if last.signal else f", which {last.how}"
    return f"no conductor led{how}, until {event.conductor} opened epoch {event.epoch}"
