"""The micro-scheduler: which node is next, and with which of its firings.

The node that was served least recently is next, with all its firings that wait, in order, as far as it
takes them together. So each node waits for one batch of every other node at most, however much comes for
those. Pure: it knows neither time nor what a firing is.
"""

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class MicroScheduler(Generic[T]):
    """Firings of type T that wait, by node.

    Args:
        max_batch: by node, how many of its firings are taken together.
    """

    def __init__(self, max_batch: Mapping[str, int]) -> None:
        for node, most in max_batch.items():
            if most < 1:
                raise ValueError(f"node {node!r}: max_batch must be at least 1, found {most}")
        self._max_batch = dict(max_batch)
        self._waiting: dict[str, deque[T]] = {
            node: deque() for node in max_batch
        }  # least recently served first

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, node: str, firing: T) -> None:
        """Queue a firing of one of the nodes."""
        self._waiting[node].append(firing)

    def take(self) -> tuple[str, list[T]] | None:
        """The next node and its firings, which do not wait any more; None when none waits."""
        node = next((node for node, firings in self._waiting.items() if firings), None)
        if node is None:
            return None
        firings = self._waiting[node] = self._waiting.pop(node)  # now the one that was served last
        return node, [firings.popleft() for _ in range(min(len(firings), self._max_batch[node]))]
