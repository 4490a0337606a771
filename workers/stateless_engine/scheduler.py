"""The micro-scheduler: the choice of the next node and its batch of firings.

The node that was served least recently is next, with its waiting firings in order, up to its largest batch.
So each node waits for at most one batch of every other node, however many firings those have. Pure: it knows
neither time nor the content of a firing.
"""

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class MicroScheduler(Generic[T]):
    """Waiting firings of type T, by node.

    Args:
        max_batch: the largest batch of each node, by its name.
    """

    def __init__(self, max_batch: Mapping[str, int]) -> None:
        for node, limit in max_batch.items():
            if limit < 1:
                raise ValueError(f"node {node!r}: max_batch must be at least 1, found {limit}")
        self._max_batch = dict(max_batch)
        # The least recently served node first.
        self._waiting: dict[str, deque[T]] = {node: deque() for node in max_batch}

    def __len__(self) -> int:
        """Return the number of waiting firings."""
        return sum(map(len, self._waiting.values()))

    def add(self, node: str, firing: T) -> None:
        """Queue a firing of one of the nodes."""
        self._waiting[node].append(firing)

    def take(self) -> tuple[str, list[T]] | None:
        """Remove and return the next node's batch; None if no firing waits."""
        node = next((node for node, firings in self._waiting.items() if firings), None)
        if node is None:
            return None
        firings = self._waiting[node] = self._waiting.pop(node)  # to the end: served most recently
        return node, [firings.popleft() for _ in range(min(len(firings), self._max_batch[node]))]
