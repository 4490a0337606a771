"""The admission queue: the order in which waiting requests are admitted. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf

from conductor.core.request import Request


def normalized_admissions(served: Counter[str], present: set[str]) -> Counter[str]:
    """The number of admissions of each tenant that has requests now.

    A tenant that had none starts at the lowest count of the others, so it gets no backlog of turns. Absent
    tenants are dropped.
    """
    least = min((served[tenant] for tenant in present if tenant in served), default=0)
    return Counter({tenant: served.get(tenant, least) for tenant in present})


def in_admission_order(
    waiting: Iterable[Request], open_of: Counter[str], served: Counter[str]
) -> Iterator[Request]:
    """Yield waiting requests in admission order. The caller updates `open_of` and `served` between items.

    By priority; then by the earliest deadline; then by the tenant with the fewest open requests; then by
    the tenant with the fewest admissions (`served`); then in order of submission.
    """
    for _, equals in groupby(sorted(waiting, key=_sort_key), key=_sort_key):
        yield from _by_tenant(equals, open_of, served)


def _sort_key(request: Request) -> tuple[float, float]:
    deadline_ns = request.deadline_ns
    return (-request.submission.priority, inf if deadline_ns is None else deadline_ns)


def _by_tenant(requests: Iterable[Request], open_of: Counter[str], served: Counter[str]) -> Iterator[Request]:
    queues: dict[str, deque[Request]] = {}
    for request in requests:
        queues.setdefault(request.tenant, deque()).append(request)

    def turn(tenant: str) -> tuple[int, int, int, str]:
        return (open_of[tenant], served[tenant], queues[tenant][0].submission_seq, tenant)

    turns = [turn(tenant) for tenant in queues]
    heapify(turns)
    while turns:
        tenant = heappop(turns)[-1]
        yield queues[tenant].popleft()
        if queues[tenant]:
            heappush(turns, turn(tenant))
