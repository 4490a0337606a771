"""Bounded memory of the requests that ended. Pure.

    ended     the full state of the last ones: to recognise second copies and late decisions
    digests   of each, the time of its end and the digest of its submission: to recognise a second submission

Both are bounded by number and by the log's time, the first by its size as well. A digest that is dropped
although the log still has the request is read from the log again when it is needed (`conductor.process`).
"""

from collections import OrderedDict
from itertools import islice, takewhile
from typing import Final, TypeAlias

import msgspec

from conductor.core.request import Request

Digests: TypeAlias = dict[str, tuple[int, str]]
"""By request id, the time of its end and the digest of its submission, in order of the ends."""

_FORGET_EVERY: Final = 1_000
"""New digests between two searches for old ones. A dict (up to a million entries) is copied in a tenth of the
time of an `OrderedDict`, but is slow to find its first entry.
"""
_AT_ONCE: Final = 8
"""Requests that are looked at for each one that ends; more than one, so that a backlog is worked off."""
_encoded: Final = msgspec.msgpack.Encoder().encode


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Limits.

    Attributes:
        ended: requests whose full state is kept, at most.
        ended_bytes: their size as they are written to a snapshot, a quarter of that in memory.
        ended_ns: the time after its end for which the full state of a request is kept.
        digests: digests that are kept, at most; each takes 0.3 KiB.
        digests_ns: the time for which a digest is kept: a day longer than the log keeps events.
    """

    ended: int
    ended_bytes: int
    ended_ns: int
    digests: int
    digests_ns: int = 8 * 24 * 3600 * 1_000_000_000


LIVE: Final = Retention(ended=1_000, ended_bytes=4 << 20, ended_ns=600 * 1_000_000_000, digests=100_000)
"""The limits of a conductor: at most some 20 MiB of full states, and 30 MiB of digests."""
REPLAY: Final = Retention(ended=10_000, ended_bytes=1 << 40, ended_ns=1 << 62, digests=1 << 40)
"""The limits of a replay, which cannot read a digest again."""


def size_of(request: Request) -> int:
    """The size of a request's state as it is written to a snapshot, in bytes."""
    return len(_encoded(request))


def trim_ended(
    ended: OrderedDict[str, Request], digests: Digests, total_bytes: int, now_ns: int, limits: Retention
) -> int:
    """Remove the oldest requests beyond the limits; return the size of the others.

    A request whose decisions are not all in the log stays, up to ten times the number: a successor has to
    publish them.
    """
    since_ns = now_ns - limits.ended_ns
    for _ in range(min(len(ended), _AT_ONCE)):
        request_id = next(iter(ended))
        is_old = digests.get(request_id, (0, ""))[0] < since_ns
        if len(ended) <= limits.ended and total_bytes <= limits.ended_bytes and not is_old:
            break
        if ended[request_id].expected and len(ended) <= 10 * limits.ended:
            ended.move_to_end(request_id)
        else:
            total_bytes -= size_of(ended.pop(request_id))
    return total_bytes


def trim_digests(digests: Digests, now_ns: int, limits: Retention) -> int:
    """Remove the oldest digests beyond the limits.

    Returns:
        The time of the last end that was forgotten too early, because of the number; 0 if there is none.
    """
    if len(digests) % _FORGET_EVERY:
        return 0
    since_ns = now_ns - limits.digests_ns
    for request_id in list(takewhile(lambda one: digests[one][0] < since_ns, digests)):
        del digests[request_id]
    forgotten_ns = 0
    for request_id in list(islice(digests, max(0, len(digests) - limits.digests))):
        forgotten_ns = digests.pop(request_id)[0]
    return forgotten_ns
