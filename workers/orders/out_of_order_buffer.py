"""Bounded buffer for edge events that arrive before the order they belong to (`early` in heartbeats).

Events of other ranks and orders of the conductor are stored in the log independently, so either may be read
first. An edge waits here, by request, until its order is read, a higher attempt begins, or the request ends.

If an edge does not fit, all edges of its attempt from its sender are dropped and the attempt is remembered.
Its order then has to fail with that reason, because a part of its input is missing. The limits hold for each
sender, so a rank that has no part in a request cannot crowd out those that have.

A pure container: no I/O, no clock.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from shared.events import EdgeEvent

MAX_PER_REQUEST: Final = 4096
MAX_BYTES_PER_REQUEST: Final = 16 * 1024 * 1024
MAX_IN_ALL: Final = 65_536
MAX_BYTES_IN_ALL: Final = 64 * 1024 * 1024
"""Limits of one sender's edges: of one request, and of all."""


@dataclass(frozen=True, slots=True)
class ReceivedEdge:
    """An event that another rank sent to this one; `rank` is the sender."""

    event: EdgeEvent
    rank: int


@dataclass(slots=True)
class _Waiting:
    edges: list[tuple[ReceivedEdge, int]] = field(default_factory=list)
    of_sender: dict[int, "_Size"] = field(default_factory=dict)
    refused: dict[tuple[int, int], str] = field(default_factory=dict)  # the reason, by attempt and sender


@dataclass(slots=True)
class _Size:
    count: int = 0
    nbytes: int = 0

    def add(self, count: int, nbytes: int) -> None:
        self.count += count
        self.nbytes += nbytes


class OutOfOrderBuffer:
    """The waiting edges of all requests."""

    def __init__(
        self,
        *,
        max_per_request: int = MAX_PER_REQUEST,
        max_bytes_per_request: int = MAX_BYTES_PER_REQUEST,
        max_in_all: int = MAX_IN_ALL,
        max_bytes_in_all: int = MAX_BYTES_IN_ALL,
    ) -> None:
        self._max_per_request = max_per_request
        self._max_bytes_per_request = max_bytes_per_request
        self._max_in_all = max_in_all
        self._max_bytes_in_all = max_bytes_in_all
        self._requests: dict[str, _Waiting] = {}
        self._of_sender: dict[int, _Size] = {}

    @property
    def count(self) -> int:
        """The number of waiting edges."""
        return sum(size.count for size in self._of_sender.values())

    @property
    def nbytes(self) -> int:
        """Their size as events."""
        return sum(size.nbytes for size in self._of_sender.values())

    def add(self, request_id: str, edge: ReceivedEdge, nbytes: int) -> None:
        """Keep an edge of `nbytes` as an event; if it does not fit, refuse its attempt and drop its edges."""
        waiting = self._requests.setdefault(request_id, _Waiting())
        attempt, sender = edge.event.attempt, edge.rank
        if (attempt, sender) in waiting.refused:
            return
        if found := self._excess(waiting, sender, nbytes):
            waiting.refused[attempt, sender] = (
                f"rank {sender} sent {found} before the order they belong to; "
                "that is more than may wait; try again later"
            )
            self._take(waiting, lambda other: (other.event.attempt, other.rank) == (attempt, sender))
            return
        waiting.edges.append((edge, nbytes))
        self._count(waiting, sender, 1, nbytes)

    def take(self, request_id: str, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        """Remove and return the `wanted` edges of a request, in the order of their arrival."""
        waiting = self._requests.get(request_id)
        if waiting is None:
            return []
        taken = self._take(waiting, wanted)
        if not waiting.edges and not waiting.refused:
            del self._requests[request_id]
        return taken

    def refused(self, request_id: str, attempt: int, senders: Collection[int]) -> str:
        """The reason why edges of these senders in an attempt are missing; empty if none are."""
        waiting = self._requests.get(request_id)
        if waiting is None:
            return ""
        found = (why for (at, who), why in waiting.refused.items() if at == attempt and who in senders)
        return next(found, "")

    def begin(self, request_id: str, attempt: int) -> None:
        """Drop the edges of attempts below `attempt`, which has begun."""
        waiting = self._requests.get(request_id)
        if waiting is not None:
            waiting.refused = {key: why for key, why in waiting.refused.items() if key[0] >= attempt}
            self.take(request_id, lambda edge: edge.event.attempt < attempt)

    def end(self, request_id: str) -> None:
        """Drop the edges of a request that has ended."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            for sender, size in list(waiting.of_sender.items()):
                self._count(waiting, sender, -size.count, -size.nbytes)

    def _excess(self, waiting: _Waiting, sender: int, nbytes: int) -> str:
        """A description of the exceeded limit; empty if one more edge fits."""
        here, in_all = waiting.of_sender.get(sender, _Size()), self._of_sender.get(sender, _Size())
        if here.count >= self._max_per_request or in_all.count >= self._max_in_all:
            return f"{here.count + 1} edges ({in_all.count + 1} for all requests)"
        if (
            here.nbytes + nbytes > self._max_bytes_per_request
            or in_all.nbytes + nbytes > self._max_bytes_in_all
        ):
            return f"{here.nbytes + nbytes} bytes of edges ({in_all.nbytes + nbytes} for all requests)"
        return ""

    def _take(self, waiting: _Waiting, wanted: Callable[[ReceivedEdge], bool]) -> list[ReceivedEdge]:
        taken = [pair for pair in waiting.edges if wanted(pair[0])]
        if taken:
            waiting.edges = [pair for pair in waiting.edges if not wanted(pair[0])]
            for edge, nbytes in taken:
                self._count(waiting, edge.rank, -1, -nbytes)
        return [edge for edge, _ in taken]

    def _count(self, waiting: _Waiting, sender: int, count: int, nbytes: int) -> None:
        for sizes in (waiting.of_sender, self._of_sender):
            size = sizes.setdefault(sender, _Size())
            size.add(count, nbytes)
            if not size.count:
                del sizes[sender]
