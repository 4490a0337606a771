"""Who waits, in the order in which they are let in. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf

from conductor.core.request import Request


def welcome(served: Counter[str], present: set[str]) -> Counter[str]:
    """How many requests of each tenant that is present were let in, as far as its turn goes.

    Who was away begins where the others are: nobody saves up turns, and nobody is counted who is not there.
    """
    least = min((served[tenant] for tenant in present if tenant in served), default=0)
    return Counter({tenant: served.get(tenant, least) for tenant in present})


def ordered(waiting: Iterable[Request], open_of: Counter[str], served: Counter[str]) -> Iterator[Request]:
    """Who waits, first the one that is let in first; whom is asked for counts for its tenant at once.

    By priority; of equals the nearest deadline; then whose tenant has the fewest requests open, then whose
    had the fewest let in (`served`), then in order of submission.
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
