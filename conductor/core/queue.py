"""The admission queue: waiting requests in admission order. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf

from conductor.core.request import Request


def welcome(served: Counter[str], present: set[str]) -> Counter[str]:
    """The number of admissions of each tenant that has requests, normalised for the next turn.

    A tenant that was away starts at the level of the others: it does not save up turns. Absent tenants are
    dropped.
    """
    least = min((served[tenant] for tenant in present if tenant in served), default=0)
    return Counter({tenant: served.get(tenant, least) for tenant in present})


def ordered(waiting: Iterable[Request], open_of: Counter[str], served: Counter[str]) -> Iterator[Request]:
    """Waiting requests in admission order. The caller updates `open_of` and `served` between items.

    By priority; then by the earliest deadline; then by the tenant with the fewest open requests; then by
    the tenant with the fewest admissions (`served`); then in order of submission.
    """
    line = sorted(waiting, key=_rank)
    for _, equals in groupby(line, key=_rank):
        yield from _by_turns(equals, open_of, served)


def _rank(request: Request) -> tuple[float, float]:
    deadline_ns = request.deadline_ns
    return (-request.submission.priority, inf if deadline_ns is None else deadline_ns)


def _by_turns(requests: Iterable[Request], open_of: Counter[str], served: Counter[str]) -> Iterator[Request]:
    lines: dict[str, deque[Request]] = {}
    for request in requests:
        lines.setdefault(request.tenant, deque()).append(request)

    def turn(tenant: str) -> tuple[int, int, int, str]:
        return (open_of[tenant], served[tenant], lines[tenant][0].submission_seq, tenant)

    turns = [turn(tenant) for tenant in lines]
    heapify(turns)
    while turns:
        tenant = heappop(turns)[-1]
        yield lines[tenant].popleft()
        if lines[tenant]:
            heappush(turns, turn(tenant))
