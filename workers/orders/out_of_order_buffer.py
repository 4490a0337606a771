"""Edges that are earlier than their order: kept until it comes, within bounds.

What one rank tells another and what the conductor orders are stored side by side, so either may be read
first. An early edge waits here, by its request, until its order is read, a higher attempt begins, or the
request ends. What no longer fits takes the request's other early edges with it and is remembered: the order,
when it comes, has to fail and say so, for a part of its input is missing.

A pure container; no I/O, no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shared.events import EdgeEvent

MAX_PER_REQUEST: Final = 4096
MAX_BYTES_PER_REQUEST: Final = 16 * 1024 * 1024
MAX_IN_ALL: Final = 65_536
MAX_BYTES_IN_ALL: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReceivedEdge:
    """What another rank told this one."""

    event: EdgeEvent
    rank: int


@dataclass(slots=True)
class _Waiting:
    edges: list[tuple[ReceivedEdge, int]] = field(default_factory=list)
    nbytes: int = 0
    refused: dict[int, str] = field(default_factory=dict)  # by attempt


class OutOfOrderBuffer:
    """All requests' early edges.

    Attributes:
        count, nbytes: how many there are, and how large they are as events.
    """

    def __init__(
        self,
        *,
        max_per_request: int = MAX_PER_REQUEST,
        max_bytes_per_request: int = MAX_BYTES_PER_REQUEST,
        max_in_all: int = MAX_IN_ALL,
        max_bytes_in_all: int = MAX_BYTES_IN_ALL,
    ) -> None:
        self.count = 0
        self.nbytes = 0
        self._max_per_request = max_per_request
        self._max_bytes_per_request = max_bytes_per_request
        self._max_in_all = max_in_all
        self._max_bytes_in_all = max_bytes_in_all
        self._requests: dict[str, _Waiting] = {}

    def add(self, request_id: str, heard: ReceivedEdge, nbytes: int) -> None:
        """Keep an edge, of `nbytes` as an event; or give up on its attempt, where it does not fit."""
        waiting = self._requests.setdefault(request_id, _Waiting())
        attempt = heard.event.attempt
        if attempt in waiting.refused:
            return
        if full := self._full(waiting, nbytes):
            waiting.refused[attempt] = (
                f"{full} were told by other ranks before the order they belong to; try again later"
            )
            self._take(waiting, lambda early: early.event.attempt == attempt)
            return
        waiting.edges.append((heard, nbytes))
        self._count(waiting, 1, nbytes)

    def take(self, request_id: str, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        """Those of a request that are `wanted`, in the order they came; they wait no longer."""
        waiting = self._requests.get(request_id)
        if waiting is None:
            return []
        taken = self._take(waiting, wanted)
        if not waiting.edges and not waiting.refused:
            del self._requests[request_id]
        return taken

    def refused(self, request_id: str, attempt: int) -> str:
        """Why edges of an attempt are missing; empty where none are."""
        waiting = self._requests.get(request_id)
        return waiting.refused.get(attempt, "") if waiting is not None else ""

    def begin(self, request_id: str, attempt: int) -> None:
        """An attempt has begun: those of lower ones wait for nothing."""
        waiting = self._requests.get(request_id)
        if waiting is not None:
            waiting.refused = {a: why for a, why in waiting.refused.items() if a >= attempt}
            self.take(request_id, lambda early: early.event.attempt < attempt)

    def end(self, request_id: str) -> None:
        """A request has ended: nothing of it is waited for."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self._count(waiting, -len(waiting.edges), -waiting.nbytes)

    def _full(self, waiting: _Waiting, nbytes: int) -> str:
        """What there is more of than there may be."""
        if len(waiting.edges) >= self._max_per_request or self.count >= self._max_in_all:
            return f"{len(waiting.edges) + 1} edges ({self.count + 1} of all requests)"
        if (
            waiting.nbytes + nbytes > self._max_bytes_per_request
            or self.nbytes + nbytes > self._max_bytes_in_all
        ):
            return f"{waiting.nbytes + nbytes} bytes of edges ({self.nbytes + nbytes} of all requests)"
        return ""

    def _take(self, waiting: _Waiting, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        taken = [pair for pair in waiting.edges if wanted(pair[0])]
        if taken:
            waiting.edges = [pair for pair in waiting.edges if not wanted(pair[0])]
            self._count(waiting, -len(taken), -sum(nbytes for _, nbytes in taken))
        return [heard for heard, _ in taken]

    def _count(self, waiting: _Waiting, count: int, nbytes: int) -> None:
        waiting.nbytes += nbytes
        self.count += count
        self.nbytes += nbytes
