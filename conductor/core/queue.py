"""The admission queue: the order in which waiting requests are admitted. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf

from conductor.core.request import Request


def normalized_admission_counts(admission_counts: Counter[str], present: set[str]) -> Counter[str]:
    """The number of admissions of each tenant that has requests now.

    A tenant that had none starts at the lowest count of the others, so it gets no backlog of turns. Absent
    tenants are dropped.
    """
    least = min((admission_counts[tenant] for tenant in present if tenant in admission_counts), default=0)
    return Counter({tenant: admission_counts.get(tenant, least) for tenant in present})


def in_admission_order(
    waiting: Iterable[Request], open_of: Counter[str], admission_counts: Counter[str]
) -> Iterator[Request]:
    """Yield waiting requests in admission order.

    The highest `priority` first; then the earliest deadline; then the tenant with the fewest open (admitted,
    not ended) requests; then the tenant with the fewest admissions; then the order of submission. `open_of`
    and `admission_counts` are numbers by tenant; the caller updates both between items.
    """
    for _, equals in groupby(sorted(waiting, key=_sort_key), key=_sort_key):
        yield from _by_tenant(equals, open_of, admission_counts)


def _sort_key(request: Request) -> tuple[float, float]:
    deadline_ns = request.deadline_ns
    return (-request.submission.priority, inf if deadline_ns is None else deadline_ns)


def _by_tenant(
    requests: Iterable[Request], open_of: Counter[str], admission_counts: Counter[str]
) -> Iterator[Request]:
    queues: dict[str, deque[Request]] = {}
    for request in requests:
        queues.setdefault(request.tenant, deque()).append(request)

    def turn(tenant: str) -> tuple[int, int, int, str]:
        return (open_of[tenant], admission_counts[tenant], queues[tenant][0].submission_seq, tenant)

    turns = [turn(tenant) for tenant in queues]
    heapify(turns)
    while turns:
        tenant = heappop(turns)[-1]
        yield queues[tenant].popleft()
        if queues[tenant]:
            heappush(turns, turn(tenant))
