"""The micro-scheduler: the choice of the next node and its batch of firings.

The node that was served least recently is next. Its batch is its first waiting firing and those that follow
of the same group, in order, up to its largest number and cost. So each node waits for at most one batch of
every other node, however many firings those have, and no firing waits for later ones for ever. Pure: it knows
neither time nor the content of a firing.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The properties by which firings are batched.

    Attributes:
        group: only firings of equal groups are batched.
        cost: counts towards the largest cost of a batch of several firings.
    """

    group: Hashable = None
    cost: float = 0.0


_ANY: Final = BatchKey()


class MicroScheduler(Generic[T]):
    """Waiting firings of type T, by node.

    Args:
        max_batch: the largest batch of each node, by its name.
        max_cost: the largest cost of a batch, by node, where there is one.
    """

    def __init__(self, max_batch: Mapping[str, int], max_cost: Mapping[str, float] | None = None) -> None:
        for node, limit in max_batch.items():
            if limit < 1:
                raise ValueError(f"node {node!r}: max_batch must be at least 1, found {limit}")
        self._max_batch = dict(max_batch)
        self._max_cost = dict(max_cost or {})
        # The least recently served node first.
        self._waiting: dict[str, deque[tuple[T, BatchKey]]] = {node: deque() for node in max_batch}

    def __len__(self) -> int:
        """Return the number of waiting firings."""
        return sum(map(len, self._waiting.values()))

    def add(self, node: str, firing: T, key: BatchKey = _ANY) -> None:
        """Queue a firing of one of the nodes."""
        self._waiting[node].append((firing, key))

    def take(self) -> tuple[str, list[T]] | None:
        """Remove and return the next node's batch; None if no firing waits."""
        node = next((node for node, firings in self._waiting.items() if firings), None)
        if node is None:
            return None
        waiting = self._waiting.pop(node)
        batch, left = self._batch(node, waiting)
        self._waiting[node] = left  # at the end: served most recently
        return node, batch

    def _batch(
        self, node: str, waiting: deque[tuple[T, BatchKey]]
    ) -> tuple[list[T], deque[tuple[T, BatchKey]]]:
        """The first firing and those that join it, and the others in their order."""
        first, key = waiting.popleft()
        batch, left = [first], deque[tuple[T, BatchKey]]()
        cost, most = key.cost, self._max_cost.get(node, float("inf"))
        while waiting and len(batch) < self._max_batch[node]:
            firing, other = waiting.popleft()
            if other.group != key.group:
                left.append((firing, other))
            elif cost + other.cost > most:
                left.append((firing, other))
                break
            else:
                batch.append(firing)
                cost += other.cost
        left.extend(waiting)
        return batch, left
