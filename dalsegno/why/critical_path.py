"""The critical path of a request: at each time between its submission and its end, what it waited for. Pure.

The time is swept once, from the submission on:

    wait for admission │ attempt 1: steps, and the conductor between them │ away │ attempt 2: ... │ end

While several steps run (sub-plans), the one that reports last is critical. The parts follow one another
without gaps, so their durations add up to the whole time exactly.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heappush
from itertools import zip_longest
from typing import Final

import msgspec

from dalsegno.history.summary import Summary
from dalsegno.why.parts import Kind, Part, named, parts_of_step
from dalsegno.why.request_facts import Incarnation, RequestFacts, Step, Stored
from shared.events import (
    EpochOpened,
    Limits,
    NodeReady,
    OutputFence,
    ProcessEnd,
    RequestAdmitted,
    RequestFailed,
    RequestResumed,
    WalkCompleted,
    WorkerLost,
)

_NAMED: Final = 8
"""The most requests that a part names."""
_HEARTBEAT_NS: Final = 1_000_000_000
"""More than the time between two heartbeats of a worker."""
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
        self._makers = defaultdict[int, list[Step]](list)  # by attempt, the steps that make items of streams
        for step in facts.steps.values():
            if step.first.ready.ends:
                self._makers[step.attempt].append(step)

    def parts(self) -> Iterator[Part]:
        """Yield all parts, in order."""
        facts, until_ns = self._facts, self._until_ns
        admitted_ns = min(facts.admitted.time_ns if facts.admitted is not None else until_ns, until_ns)
        yield from self._admission(facts.submitted_ns, admitted_ns)
        at_ns, attempt, explained = admitted_ns, 1, set[int]()
        fences = [
            mark
            for mark in facts.marks
            if isinstance(mark.event, OutputFence) and (facts.end is None or mark.seq < facts.end.seq)
        ]
        for fence, following in zip_longest(fences, fences[1:]):
            limit_ns = following.time_ns if following is not None else until_ns
            lost = self._lost_before(fence, attempt, explained)
            stop_ns = self._stop_ns(lost, fence, at_ns)
            yield from self._attempt(attempt, at_ns, stop_ns, fence)
            attempt = fence.event.attempt
            resumed = self._resumed_after(fence)
            resumed_ns = resumed.time_ns if resumed is not None else self._ordered_after(fence, limit_ns)
            resumed_ns = max(stop_ns, min(resumed_ns, limit_ns))
            yield from self._away(lost, fence, stop_ns, resumed_ns)
            at_ns = resumed_ns
        end = facts.end
        if end is not None and isinstance(end.event, RequestFailed):
            lost = self._lost_before(end, attempt, explained)
            if lost is not None:
                stop_ns = self._stop_ns(lost, end, at_ns)
                yield from self._attempt(attempt, at_ns, stop_ns, end)
                yield from self._away(lost, end, stop_ns, until_ns)
                return
        yield from self._attempt(attempt, at_ns, until_ns, None)

    def _stop_ns(self, lost: Incarnation | None, fence: Stored, begin_ns: int) -> int:
        """The time at which the attempt before a fence stopped: with the worker that was lost, if one was."""
        stop_ns = fence.time_ns if lost is None else min(self._died_ns(lost, fence), fence.time_ns)
        return max(begin_ns, stop_ns)

    # ---- attempts ----------------------------------------------------------------------------------
    def _attempt(self, attempt: int, begin_ns: int, stop_ns: int, fence: Stored | None) -> Iterator[Part]:
        """Yield the steps of an attempt that a fence ended, or that is the last one."""
        later = deque(
            sorted(
                (step for step in self._facts.steps.values() if step.attempt == attempt),
                key=lambda step: (step.first.ordered_ns, step.first.seq),
            )
        )
        running: list[tuple[int, int, Step]] = []  # a heap: the one that reports last first, then by order
        at_ns = begin_ns
        while at_ns < stop_ns:
            while later and later[0].first.ordered_ns <= at_ns:
                step = later.popleft()
                heappush(running, (-_reported_ns(step, stop_ns), step.first.seq, step))
            end_ns = -running[0][0] if running else 0
            if end_ns <= at_ns:  # and so all others have reported, too
                running.clear()
                next_ns = min(later[0].first.ordered_ns, stop_ns) if later else stop_ns
                yield from self._deciding(at_ns, next_ns, is_last=not later)
                at_ns = next_ns
                continue
            step = running[0][-1]
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
        reports = [order.report for order in step.orders.values()]
        taken = {name for one in reports if isinstance(one, WalkCompleted) for name in one.streams}
        end_ns = _reported_ns(step, self._until_ns)
        return {
            stream: one
            for one in self._makers.get(step.attempt, [])
            if one is not step
            if one.first.ordered_ns < end_ns and _reported_ns(one, self._until_ns) > step.first.ordered_ns
            for stream in one.first.ready.ends
            if not taken or stream in taken
        }

    def _deciding(self, begin_ns: int, end_ns: int, *, is_last: bool) -> Iterator[Part]:
        """Yield the time between a fact and the decision that follows; a new leader has to come first."""
        text = "the conductor ends the request" if is_last else "the conductor decides on the next step"
        opened = [one for one in self._facts.epochs if begin_ns < one.time_ns < end_ns]
        if opened:
            leads_ns = opened[-1].time_ns
            missing = _new_leader(opened[-1], begin_ns)
            yield Part(kind=Kind.NO_CONDUCTOR, begin_ns=begin_ns, end_ns=leads_ns, text=missing)
            begin_ns = leads_ns
        yield Part(kind=Kind.CONDUCTOR, begin_ns=begin_ns, end_ns=end_ns, text=text)

    # ---- between attempts --------------------------------------------------------------------------
    def _lost_before(self, fence: Stored, attempt: int, explained: set[int]) -> Incarnation | None:
        """The incarnation whose end a fence, or a failure, follows: of those with an order of the attempt.

        `explained` has those that an earlier fence followed; the one that is found is added.
        """
        used = {
            order.ready.incarnation
            for step in self._facts.steps.values()
            if step.attempt == attempt
            for order in step.orders.values()
        }
        ended = {
            seq: one
            for one in self._facts.incarnations.values()
            if one.seq in used and one.seq not in explained and (seq := self._end_seq(one)) < fence.seq
        }
        if not ended:
            return None
        found = ended[max(ended)]
        explained.add(found.seq)
        return found

    def _end_seq(self, one: Incarnation) -> int:
        """The position of the record by which an incarnation is over; beyond the log if it is not."""
        later = self._facts.successor(one)
        seqs = [stored.seq for stored in (one.lost, one.left) if stored is not None]
        return min([*seqs, *([later.seq] if later is not None else [])], default=1 << 63)

    def _died_ns(self, lost: Incarnation, fence: Stored) -> int:
        """The time at which an incarnation stopped to work, as far as it is known.

        The launcher's clock may differ from the log's: what it says is bounded by what the log says.
        """
        end, later = self._facts.process_end(lost), self._facts.successor(lost)
        earliest_ns, latest_ns = lost.joined_ns, fence.time_ns
        if later is not None:
            latest_ns = min(latest_ns, later.joined_ns)
        if lost.lost is not None and isinstance(lost.lost.event, WorkerLost):
            latest_ns = min(latest_ns, lost.lost.time_ns)
            silent_ns = round(lost.lost.event.silent_s * 1e9)
            if silent_ns:
                earliest_ns = max(earliest_ns, lost.lost.time_ns - silent_ns - _HEARTBEAT_NS)
            if end is None or end.reason:
                return max(earliest_ns, latest_ns - silent_ns)
        if end is None or end.reason:
            return latest_ns
        return max(earliest_ns, min(end.ended_ns, latest_ns))

    def _resumed_after(self, fence: Stored) -> Stored | None:
        """The resumption of a fence's attempt."""
        found = (
            mark
            for mark in self._facts.marks
            if isinstance(mark.event, RequestResumed)
            and mark.seq > fence.seq
            and mark.event.attempt == fence.event.attempt
        )
        return next(found, None)

    def _ordered_after(self, fence: Stored, limit_ns: int) -> int:
        """The time of the first order of a fence's attempt; `limit_ns` if there is none."""
        orders = (
            step.first.ordered_ns
            for step in self._facts.steps.values()
            if step.attempt == fence.event.attempt and step.first.seq > fence.seq
        )
        return min(orders, default=limit_ns)

    def _away(self, lost: Incarnation | None, fence: Stored, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the time after an attempt: until a loss is noticed, until the rank is back, and the rest."""
        if lost is None:
            reason = fence.event.reason if isinstance(fence.event, OutputFence) else ""
            yield Part(kind=Kind.CONDUCTOR, begin_ns=begin_ns, end_ns=end_ns, text=reason)
            return
        later = self._facts.successor(lost)
        rank, how = lost.rank, self._how(lost)
        at_ns, noticed_ns = begin_ns, min(self._noticed_ns(lost, fence), end_ns)
        if noticed_ns > at_ns:
            text = f"rank {rank} was gone ({how}), and this was not known yet"
            yield Part(kind=Kind.SILENT, begin_ns=at_ns, end_ns=noticed_ns, text=text, rank=rank)
            at_ns = noticed_ns
        if later is not None and at_ns < later.joined_ns <= end_ns:
            came = "it joined again" if later.pid == lost.pid else "its process started and loaded the model"
            text = f"without rank {rank} ({how}), until {came}"
            yield Part(kind=Kind.AWAY, begin_ns=at_ns, end_ns=later.joined_ns, text=text, rank=rank)
            at_ns = later.joined_ns
        resumed = self._resumed_after(fence)
        reason = (
            resumed.event.reason if resumed is not None and isinstance(resumed.event, RequestResumed) else ""
        )
        text = reason or f"the request waits for a place without rank {rank} ({how})"
        kind = Kind.CONDUCTOR if reason else Kind.AWAY
        yield Part(kind=kind, begin_ns=at_ns, end_ns=end_ns, text=text, rank=None if reason else rank)

    def _noticed_ns(self, lost: Incarnation, fence: Stored) -> int:
        """The time at which the end of an incarnation was in the log; 0 if its successor joined before."""
        if lost.lost is not None and lost.lost.seq < fence.seq:
            return lost.lost.time_ns
        later = self._facts.successor(lost)
        return 0 if later is not None and later.joined_ns <= fence.time_ns else fence.time_ns

    def _how(self, lost: Incarnation) -> str:
        """Describe the end of an incarnation."""
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
        """Yield the wait for admission: without a conductor, without a rank, and behind other requests."""
        at_ns = begin_ns
        for part in sorted(
            [*self._without_leader(begin_ns, end_ns), *self._without_rank(begin_ns, end_ns)],
            key=lambda one: one.begin_ns,
        ):
            if part.end_ns <= at_ns:
                continue
            yield self._in_queue(at_ns, max(at_ns, part.begin_ns))
            yield msgspec.structs.replace(part, begin_ns=max(at_ns, part.begin_ns))
            at_ns = part.end_ns
        yield self._in_queue(at_ns, end_ns)

    def _without_leader(self, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the times in which a conductor is known to have been missing."""
        for opened in self._facts.epochs:
            if not begin_ns < opened.time_ns <= end_ns:
                continue
            end = _leader_end(opened, begin_ns)
            if end is not None or opened is self._facts.epochs[0]:
                yield Part(
                    kind=Kind.NO_CONDUCTOR,
                    begin_ns=end.ended_ns if end is not None else begin_ns,
                    end_ns=opened.time_ns,
                    text=_new_leader(opened, begin_ns),
                )

    def _without_rank(self, begin_ns: int, end_ns: int) -> Iterator[Part]:
        """Yield the last wait for a rank that the request was placed on then."""
        placed = self._placed_on()
        needed = [
            one
            for one in self._facts.incarnations.values()
            if one.seq in placed and begin_ns < one.joined_ns <= end_ns
        ]
        if not needed:
            return
        last = max(needed, key=lambda one: one.joined_ns)
        before = [one for one in self._facts.incarnations.values() if self._facts.successor(one) is last]
        gone_ns = begin_ns
        if before:
            stored = before[0].lost or before[0].left
            end = self._facts.process_end(before[0])
            gone_ns = end.ended_ns if end is not None else stored.time_ns if stored is not None else begin_ns
        if gone_ns < last.joined_ns:
            text = f"rank {last.rank} was not there: its process started and loaded the model"
            yield Part(
                kind=Kind.AWAY,
                begin_ns=max(begin_ns, gone_ns),
                end_ns=last.joined_ns,
                text=text,
                rank=last.rank,
            )

    def _in_queue(self, begin_ns: int, end_ns: int) -> Part:
        """The wait for a place."""
        facts = self._facts
        admitted = facts.admitted.event if facts.admitted is not None else None
        reason = admitted.reason if isinstance(admitted, RequestAdmitted) else ""
        why = f" ({reason})" if reason else ""
        if end_ns - begin_ns < _SOON_NS:
            text = f"the conductor admits the request{why}" if reason else "the conductor reads the request"
            return Part(kind=Kind.CONDUCTOR, begin_ns=begin_ns, end_ns=end_ns, text=text)
        ahead = self._ahead(begin_ns, end_ns)
        if isinstance(admitted, RequestAdmitted) and not _took_last_place(admitted.limits):
            ahead = []
        behind = f" behind {named(ahead[:_NAMED], len(ahead))}" if ahead else ""
        what = "it waited for a place" if ahead else "it waited for admission"
        return Part(
            kind=Kind.ADMISSION,
            begin_ns=begin_ns,
            end_ns=end_ns,
            text=f"{what}{behind}{why}",
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
        """The requests that had places in this time: those that were placed before, or overtook."""
        placed = [
            (one.end_ns or self._until_ns, one.request_id)
            for one in self._neighbours
            if one.admitted_ns is not None
            and one.admitted_ns < end_ns
            and (one.end_ns is None or one.end_ns > begin_ns)
        ]
        return [request_id for _, request_id in sorted(placed)]


def _took_last_place(limits: Limits) -> bool:
    """True if the request took the last place: so it had waited for it. Older logs do not tell."""
    return 0 < limits.max_concurrent <= limits.concurrent


def _leader_end(opened: Stored, begin_ns: int) -> ProcessEnd | None:
    """Return the end of the process before a new leader's, if that was after `begin_ns`."""
    assert isinstance(opened.event, EpochOpened)
    ends = (end for end in opened.event.ended if begin_ns < end.ended_ns <= opened.time_ns)
    return next(ends, None)


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


def _new_leader(opened: Stored, begin_ns: int) -> str:
    """Describe the absence of a leader; a conductor's epoch may say how the process before it ended."""
    event = opened.event
    assert isinstance(event, EpochOpened)
    end = _leader_end(opened, begin_ns)
    how = f" (the process before it was {end.how})" if end is not None else ""
    return f"no conductor led, until {event.conductor} opened epoch {event.epoch}{how}"
