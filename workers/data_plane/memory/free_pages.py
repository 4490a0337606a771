"""Free pages of an arena: first fit from the bottom, so that used memory is reused.

Pure: page numbers only. Adjacent free pages form one extent. Extents are grouped by the power of two of their
length. In the groups above that of a request each extent is long enough, and the lowest one is chosen.
"""

from bisect import bisect_left, insort


class FreePages:
    """The pages `0..total`, initially all free."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = 0
        self._length_from: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._classes: list[list[int]] = [[] for _ in range(total.bit_length() + 1)]
        self._insert(0, total)

    @property
    def largest(self) -> int:
        """The length of the longest free extent."""
        for starts in reversed(self._classes):
            if starts:
                return max(self._length_from[start] for start in starts)
        return 0

    def take(self, length: int) -> int | None:
        """Take `length` pages, as low as possible, and return the first; None if there is no such extent."""
        start = self._lowest(length)
        if start is None:
            return None
        found = self._remove(start)
        if found > length:
            self._insert(start + length, found - length)
        return start

    def give(self, start: int, length: int) -> None:
        """Free pages."""
        if (before := self._start_before.get(start)) is not None:
            length += self._remove(before)
            start = before
        if start + length in self._length_from:
            length += self._remove(start + length)
        self._insert(start, length)

    def _lowest(self, length: int) -> int | None:
        own = length.bit_length()
        if own >= len(self._classes):
            return None
        longer = min((starts[0] for starts in self._classes[own + 1 :] if starts), default=None)
        for start in self._classes[own]:
            if longer is not None and longer < start:
                break
            if self._length_from[start] >= length:
                return start
        return longer

    def _insert(self, start: int, length: int) -> None:
        self.free += length
        self._length_from[start] = length
        self._start_before[start + length] = start
        insort(self._classes[length.bit_length()], start)

    def _remove(self, start: int) -> int:
        length = self._length_from.pop(start)
        self.free -= length
        del self._start_before[start + length]
        starts = self._classes[length.bit_length()]
        del starts[bisect_left(starts, start)]
        return length
