"""Bounded buffer for edge events that arrive before the order they belong to (`early` in heartbeats).

Events of other ranks and orders of the conductor are stored in the log independently, so either may be read
first. An edge waits here, by request, until its order is read, a higher attempt begins, or the request ends.

If an edge does not fit, all edges of its attempt are dropped and the attempt is remembered. Its order then
has to fail with that reason, because a part of its input is missing. Other attempts keep their edges.

A pure container: no I/O, no clock.
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
    """An event that another rank sent to this one; `rank` is the sender."""

    event: EdgeEvent
    rank: int


@dataclass(slots=True)
class _Waiting:
    edges: list[tuple[ReceivedEdge, int]] = field(default_factory=list)
    nbytes: int = 0
    refused: dict[int, str] = field(default_factory=dict)  # the reason, by attempt


class OutOfOrderBuffer:
    """The waiting edges of all requests.

    Attributes:
        count, nbytes: the number of waiting edges, and their size as events.
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

    def add(self, request_id: str, edge: ReceivedEdge, nbytes: int) -> None:
        """Keep an edge of `nbytes` as an event; if it does not fit, refuse its attempt and drop its edges."""
        waiting = self._requests.setdefault(request_id, _Waiting())
        attempt = edge.event.attempt
        if attempt in waiting.refused:
            return
        if found := self._excess(waiting, nbytes):
            waiting.refused[attempt] = (
                f"other ranks sent {found} before the order they belong to; "
                "that is more than may wait; try again later"
            )
            self._take(waiting, lambda other: other.event.attempt == attempt)
            return
        waiting.edges.append((edge, nbytes))
        self._count(waiting, 1, nbytes)

    def take(self, request_id: str, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        """Remove and return the `wanted` edges of a request, in the order of their arrival."""
        waiting = self._requests.get(request_id)
        if waiting is None:
            return []
        taken = self._take(waiting, wanted)
        if not waiting.edges and not waiting.refused:
            del self._requests[request_id]
        return taken

    def refused(self, request_id: str, attempt: int) -> str:
        """The reason why edges of an attempt are missing; empty if none are."""
        waiting = self._requests.get(request_id)
        return waiting.refused.get(attempt, "") if waiting is not None else ""

    def begin(self, request_id: str, attempt: int) -> None:
        """Drop the edges of attempts below `attempt`, which has begun."""
        waiting = self._requests.get(request_id)
        if waiting is not None:
            waiting.refused = {a: why for a, why in waiting.refused.items() if a >= attempt}
            self.take(request_id, lambda edge: edge.event.attempt < attempt)

    def end(self, request_id: str) -> None:
        """Drop the edges of a request that has ended."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self._count(waiting, -len(waiting.edges), -waiting.nbytes)

    def _excess(self, waiting: _Waiting, nbytes: int) -> str:
        """A description of the exceeded limit; empty if one more edge fits."""
        if len(waiting.edges) >= self._max_per_request or self.count >= self._max_in_all:
            return f"{len(waiting.edges) + 1} edges ({self.count + 1} for all requests)"
        if (
            waiting.nbytes + nbytes > self._max_bytes_per_request
            or self.nbytes + nbytes > self._max_bytes_in_all
        ):
            return f"{waiting.nbytes + nbytes} bytes of edges ({self.nbytes + nbytes} for all requests)"
        return ""

    def _take(self, waiting: _Waiting, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        taken = [pair for pair in waiting.edges if wanted(pair[0])]
        if taken:
            waiting.edges = [pair for pair in waiting.edges if not wanted(pair[0])]
            self._count(waiting, -len(taken), -sum(nbytes for _, nbytes in taken))
        return [edge for edge, _ in taken]

    def _count(self, waiting: _Waiting, count: int, nbytes: int) -> None:
        waiting.nbytes += nbytes
        self.count += count
        self.nbytes += nbytes
