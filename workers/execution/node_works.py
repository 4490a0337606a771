"""The work of a step's nodes on this rank: how long their calls took, what they waited for, and behind whom.

`NodeExecutor` times each call, and gives each engine a record (`EngineWork`). Together they become the
`NodeWork` of the step's report. A call that is still running counts up to now, so a step that was stopped, or
that has failed, reports what it waited for. Records of calls that have ended are added up, so that a loop of
thousands of calls needs no memory for each.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.events import MAX_NAMED, NodeWork, Preemption
from workers.threads.engine_work import EngineWork, Eviction


@dataclass(slots=True)
class _Calls:
    """The calls of one node.

    Attributes:
        took_s: the durations of those that have ended.
        begun_s: the begins of those that run.
        records: of sequences and runs, which may outlive a call, and of calls that run.
        ended: the sum of the records of calls that have ended.
    """

    count: int = 0
    took_s: float = 0.0
    begun_s: list[float] = field(default_factory=list)
    records: list[EngineWork] = field(default_factory=list)
    ended: NodeWork = field(default_factory=NodeWork)


class NodeWorks:
    """The calls of one step's nodes, and the records of their work in engines.

    Args:
        request_id: the step's request; it is not named as its own neighbour.
    """

    def __init__(self, request_id: str = "") -> None:
        self._request_id = request_id
        self._nodes: dict[str, _Calls] = {}

    @contextmanager
    def call(self, node: str) -> Iterator[None]:
        """Time a call of a node."""
        calls, begun_s = self._of(node), time.perf_counter()
        calls.count += 1
        calls.begun_s.append(begun_s)
        try:
            yield
        finally:
            calls.begun_s.remove(begun_s)
            calls.took_s += time.perf_counter() - begun_s

    def record(self, node: str) -> EngineWork:
        """Return a new record for a sequence or a run of a node."""
        work = EngineWork()
        self._of(node).records.append(work)
        return work

    @contextmanager
    def record_of_call(self, node: str) -> Iterator[EngineWork]:
        """A new record for one call of a node, which is added up when the call ends."""
        calls, work = self._of(node), self.record(node)
        try:
            yield work
        finally:
            work.end()
            calls.records.remove(work)
            calls.ended = self._sum([work], calls.ended)

    def report(self) -> dict[str, NodeWork]:
        """Return the work so far, by node."""
        now_s = time.perf_counter()
        found = {}
        for node, calls in self._nodes.items():
            work = self._sum(calls.records, calls.ended)
            took_s = calls.took_s + sum(now_s - begun_s for begun_s in calls.begun_s)
            found[node] = NodeWork(
                calls=calls.count,
                took_s=_rounded(took_s),
                waited_s=_rounded(work.waited_s),
                behind=work.behind,
                behind_count=work.behind_count,
                lacked=work.lacked,
                first_token_s=_rounded(work.first_token_s),
                held_s=_rounded(work.held_s),
                steps=work.steps,
                rows=round(work.rows, 2),
                cached_tokens=work.cached_tokens,
                beside=work.beside,
                beside_s=_rounded(work.beside_s),
                preemptions=work.preemptions,
                preemption_count=work.preemption_count,
                preempted_s=_rounded(work.preempted_s),
                drafted=work.drafted,
                accepted=work.accepted,
                undrafted_steps=work.undrafted_steps,
            )
        return found

    def _of(self, node: str) -> _Calls:
        return self._nodes.setdefault(node, _Calls())

    def _sum(self, records: Iterable[EngineWork], total: NodeWork) -> NodeWork:
        """Add records to a sum, whose times are not rounded."""
        now_s = time.perf_counter()
        for one in records:
            steps, rows = one.so_far
            all_steps = total.steps + steps
            beside = Counter(total.beside)
            for key, tokens in one.beside.items():
                beside[request_of(key)] += tokens
            del beside[self._request_id]
            is_first = bool(one.lacked) and not total.lacked
            behind = self._others(one.behind)
            total = NodeWork(
                waited_s=total.waited_s + _waited_s(one, now_s),
                lacked=one.lacked if is_first else total.lacked,
                behind=behind if is_first else total.behind,
                behind_count=max(len(behind), one.behind_count) if is_first else total.behind_count,
                first_token_s=total.first_token_s or _first_token_s(one),
                held_s=total.held_s + one.held_s + _since(one.held_since_s, now_s),
                steps=all_steps,
                rows=(total.rows * total.steps + rows) / all_steps if all_steps else 0.0,
                cached_tokens=total.cached_tokens + one.cached_tokens,
                beside=dict(beside.most_common(MAX_NAMED)),
                beside_s=total.beside_s + one.beside_s,
                preemptions=[
                    *total.preemptions,
                    *(_preemption(one, eviction, now_s) for eviction in one.evictions),
                ][:MAX_NAMED],
                preemption_count=total.preemption_count + one.eviction_count,
                preempted_s=total.preempted_s + one.evicted_s + _since(one.evicted_since_s, now_s),
                drafted=total.drafted + one.drafts.drafted,
                accepted=total.accepted + one.drafts.accepted,
                undrafted_steps=total.undrafted_steps + one.drafts.declined_steps,
            )
        return total

    def _others(self, keys: Iterable[str]) -> list[str]:
        """The requests of sequences, each once, without the step's own."""
        return [one for one in dict.fromkeys(map(request_of, keys)) if one != self._request_id]


def request_of(key: str) -> str:
    """Return the request of a sequence: its key begins with the request's id, which has no dots."""
    return key.partition(".")[0]


def _waited_s(work: EngineWork, now_s: float) -> float:
    """The time from the queue to the first place; none for what was never given to the engine."""
    if work.queued_s is None:
        return 0.0
    until_s = work.admitted_s if work.admitted_s is not None else work.ended_s
    return (until_s if until_s is not None else now_s) - work.queued_s


def _first_token_s(work: EngineWork) -> float:
    if work.queued_s is None or work.first_token_s is None:
        return 0.0
    return work.first_token_s - work.queued_s


def _since(begun_s: float | None, now_s: float) -> float:
    return 0.0 if begun_s is None else now_s - begun_s


def _preemption(work: EngineWork, eviction: Eviction, now_s: float) -> Preemption:
    ended_s = eviction.ended_s if eviction.ended_s is not None else work.ended_s
    return Preemption(
        at_s=_rounded(eviction.at_s - (work.queued_s or eviction.at_s)),
        by=request_of(eviction.by),
        tokens=eviction.recomputed,
        waited_s=_rounded((ended_s if ended_s is not None else now_s) - eviction.at_s),
    )


def _rounded(seconds: float) -> float:
    """Microseconds: more digits are noise, and take room in the log."""
    return round(seconds, 6)
