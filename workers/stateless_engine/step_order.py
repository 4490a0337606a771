"""The order in which the calls of stepped runs are computed. Pure: durations are given to it.

Groups of calls share the time of the device equally: the group that was served least is next. So a picture of
four steps does not wait for a video of fifty. Within a group the oldest run is first, and other runs join its
forward where that pays (`BatchGain`): where it does not, it would only make all of them late.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from workers.stateless_engine.batch_gain import BatchGain

T = TypeVar("T", bound=Hashable)

_GROUPS: Final = 256
"""The groups whose times are remembered."""


@dataclass(slots=True, eq=False)
class _Group(Generic[T]):
    """The calls of one group: runs that wait for theirs, by arrival; the seconds that it was served."""

    waiting: dict[T, float] = field(default_factory=dict)
    gain: BatchGain = field(default_factory=BatchGain)
    served_s: float = 0.0


class StepOrder(Generic[T]):
    """The runs of one stepped node, of type T.

    Args:
        max_batch: the most calls of one forward.
        max_runs: the most runs under way.
        max_cost: the largest cost of several calls in one forward.
    """

    def __init__(self, *, max_batch: int, max_runs: int, max_cost: float = float("inf")) -> None:
        if max_batch < 1 or max_runs < 1:
            raise ValueError(
                f"expected max_batch and max_runs of at least 1, found {max_batch} and {max_runs}"
            )
        self._max_batch = max_batch
        self._max_runs = max_runs
        self._max_cost = max_cost
        self._new: deque[T] = deque()
        self._arrivals: dict[T, int] = {}  # of the runs under way
        self._groups: OrderedDict[Hashable, _Group[T]] = OrderedDict()
        self._taken: Hashable = None
        self._number = 0

    def __len__(self) -> int:
        """Return the number of runs, those that wait to be started included."""
        return len(self._new) + len(self._arrivals)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the runs."""
        yield from (*self._new, *self._arrivals)

    def add(self, run: T) -> None:
        """Queue a run that is to be started."""
        self._new.append(run)

    def next_start(self) -> T | None:
        """Take the run to be started next; None if there is none, or the most are under way."""
        if not self._new or len(self._arrivals) >= self._max_runs:
            return None
        run = self._new.popleft()
        self._number += 1
        self._arrivals[run] = self._number
        return run

    def ask(self, run: T, group: Hashable, cost: float) -> None:
        """Note the call that a started run needs next."""
        if group not in self._groups:
            # A new group is not served for the time in which it was not there.
            least = min((one.served_s for one in self._groups.values() if one.waiting), default=0.0)
            self._groups[group] = _Group(served_s=least)
            self._forget()
        found = self._groups[group]
        if not found.waiting:
            busy = (one.served_s for one in self._groups.values() if one.waiting)
            found.served_s = max(found.served_s, min(busy, default=found.served_s))
        found.waiting[run] = cost

    def take(self) -> list[T]:
        """Take the runs whose calls are computed next, together; none if no call waits."""
        asking = [(group.served_s, key) for key, group in self._groups.items() if group.waiting]
        if not asking:
            return []
        _, self._taken = min(asking, key=lambda one: one[0])
        self._groups.move_to_end(self._taken)
        group = self._groups[self._taken]
        oldest = sorted(group.waiting, key=self._arrivals.__getitem__)
        batch = self._within_cost(group, oldest[: self._max_batch])
        batch = batch[: group.gain.size(len(batch))]
        for run in batch:
            del group.waiting[run]
        return batch

    def learn(self, size: int, seconds: float) -> float:
        """Note the duration of the forward over the calls that were taken last.

        Returns:
            the gain by batches of their group (`BatchGain.gain`).
        """
        group = self._groups[self._taken]
        group.served_s += seconds
        group.gain.learn(size, seconds)
        return group.gain.gain

    def drop(self, run: T) -> None:
        """Forget a run that has ended."""
        if run in self._arrivals:
            del self._arrivals[run]
            for group in self._groups.values():
                group.waiting.pop(run, None)
        elif run in self._new:
            self._new.remove(run)

    def _within_cost(self, group: _Group[T], runs: list[T]) -> list[T]:
        """The first of some runs, and those that follow up to the largest cost."""
        batch, cost = runs[:1], group.waiting[runs[0]]
        for run in runs[1:]:
            cost += group.waiting[run]
            if cost > self._max_cost:
                break
            batch.append(run)
        return batch

    def _forget(self) -> None:
        """Drop the groups that were not used for the longest time, if there are too many."""
        idle = [key for key, group in self._groups.items() if not group.waiting and key != self._taken]
        for key in idle[: max(0, len(self._groups) - _GROUPS)]:
            del self._groups[key]
