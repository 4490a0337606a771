"""Simulated time: what happens when. Pure."""

import heapq
from collections.abc import Callable


class Timeline:
    """A queue of things to do, in order of time; those of one time in the order in which they were added.

    Attributes:
        now_s: the present time, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._added = 0

    def at(self, when_s: float, what: Callable[[], object]) -> None:
        """Do something then; not before now."""
        self._added += 1
        heapq.heappush(self._due, (max(when_s, self.now_s), self._added, what))

    def after(self, pause_s: float, what: Callable[[], object]) -> None:
        """Do something after a while."""
        self.at(self.now_s + pause_s, what)

    def run(self) -> None:
        """Do all of it, until there is nothing left to do."""
        while self._due:
            self.now_s, _, what = heapq.heappop(self._due)
            what()
