"""The work of a step's nodes on this rank: how long their calls took, what they waited for, and behind whom.

`NodeExecutor` times each call, and gives each engine a record (`EngineWork`). Together they become the
`NodeWork` of the step's report. A call that is still running counts up to now, so a step that was stopped, or
that has failed, reports what it waited for.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from shared.events import MAX_NAMED, NodeWork, Preemption
from workers.threads.engine_work import EngineWork, Eviction


class NodeWorks:
    """The calls of one step's nodes, and the records of their work in engines."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._took_s: dict[str, float] = {}
        self._running: dict[str, list[float]] = {}
        self._records: dict[str, list[EngineWork]] = {}

    @contextmanager
    def call(self, node: str) -> Iterator[None]:
        """Time a call of a node."""
        begun_s = time.perf_counter()
        self._calls[node] += 1
        running = self._running.setdefault(node, [])
        running.append(begun_s)
        try:
            yield
        finally:
            running.remove(begun_s)
            self._took_s[node] = self._took_s.get(node, 0.0) + time.perf_counter() - begun_s

    def record(self, node: str) -> EngineWork:
        """Return a new record for a sequence, run or firing of a node, which is queued now."""
        work = EngineWork()
        self._records.setdefault(node, []).append(work)
        return work

    def report(self) -> dict[str, NodeWork]:
        """Return the work so far, by node."""
        now_s = time.perf_counter()
        return {node: self._of(node, calls, now_s) for node, calls in self._calls.items()}

    def _of(self, node: str, calls: int, now_s: float) -> NodeWork:
        records = self._records.get(node, [])
        took_s = self._took_s.get(node, 0.0)
        took_s += sum(now_s - begun_s for begun_s in self._running.get(node, []))
        counts = [one.so_far for one in records]
        steps, rows = sum(one[0] for one in counts), sum(one[1] for one in counts)
        beside = _sum_of(one.beside for one in records)
        first = next((one for one in records if one.lacked), None)
        evictions = [_preemption(one, eviction, now_s) for one in records for eviction in one.evictions]
        return NodeWork(
            calls=calls,
            took_s=_rounded(took_s),
            waited_s=_rounded(sum(_waited_s(one, now_s) for one in records)),
            lacked=first.lacked if first is not None else "",
            behind=_requests(first.behind) if first is not None else [],
            behind_count=first.behind_count if first is not None else 0,
            first_token_s=_rounded(_first_token_s(records)),
            held_s=_rounded(sum(_held_s(one, now_s) for one in records)),
            steps=steps,
            rows=round(rows / steps, 2) if steps else 0.0,
            cached_tokens=sum(one.cached_tokens for one in records),
            beside=dict(beside.most_common(MAX_NAMED)),
            beside_s=_rounded(sum(one.beside_s for one in records)),
            preemptions=evictions[:MAX_NAMED],
            preemption_count=sum(one.eviction_count for one in records),
        )


def request_of(key: str) -> str:
    """Return the request of a sequence: its key begins with the request's id, which has no dots."""
    return key.partition(".")[0]


def _requests(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(request_of, keys)))


def _sum_of(all_beside: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for beside in all_beside:
        for key, tokens in beside.items():
            total[request_of(key)] += tokens
    return total


def _waited_s(work: EngineWork, now_s: float) -> float:
    until_s = work.admitted_s if work.admitted_s is not None else work.ended_s
    return (until_s if until_s is not None else now_s) - work.queued_s


def _first_token_s(records: list[EngineWork]) -> float:
    found = (one for one in records if one.first_token_s is not None)
    return next((one.first_token_s - one.queued_s for one in found if one.first_token_s is not None), 0.0)


def _held_s(work: EngineWork, now_s: float) -> float:
    since_s = work.held_since_s
    return work.held_s + (0.0 if since_s is None else now_s - since_s)


def _preemption(work: EngineWork, eviction: Eviction, now_s: float) -> Preemption:
    ended_s = eviction.ended_s if eviction.ended_s is not None else work.ended_s
    return Preemption(
        at_s=_rounded(eviction.at_s - work.queued_s),
        by=request_of(eviction.by),
        tokens=eviction.recomputed,
        waited_s=_rounded((ended_s if ended_s is not None else now_s) - eviction.at_s),
    )


def _rounded(seconds: float) -> float:
    """Microseconds: more digits are noise, and take room in the log."""
    return round(seconds, 6)
