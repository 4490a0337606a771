"""Stop strings: the text up to the earliest of them, piece by piece.

A pure fold over the pieces of a text: however the text is cut into pieces, the same comes out, and a
piece once released is never taken back. What may be the beginning of a stop string is held back.

The earliest match is the one that *begins* first, as in `min(text.find(stop) for stop in stops)`. So with
the stops `abcd` and `bc`, the text `abc` is undecided until its next character.

An Aho-Corasick automaton: a constant price per character, whatever the stop strings are. (They come from
clients: searching again at every piece could be made to cost milliseconds per token.)
"""

from collections import deque
from collections.abc import Sequence
from typing import Final


class StopMatcher:
    """Cuts a text at the earliest of `stops`.

    Attributes:
        matched: a stop string was found; nothing more is released.
    """

    __slots__ = ("_candidate", "_held", "_held_at", "_position", "_state", "_table", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched = False
        self._table = _Automaton(stops) if stops else None
        self._state = _ROOT
        self._held = ""
        self._held_at = 0  # where in the text `_held` begins
        self._position = 0  # how much of the text was read
        self._candidate: int | None = None  # where the earliest match so far begins

    def push(self, text: str) -> str:
        """Read a piece; return what is now sure to belong to the answer."""
        if self.matched:
            return ""
        if self._table is None:
            return text
        self._held += text
        for character in text:
            begin = self._read(character, self._table)
            if begin is not None:
                self.matched = True
                return self._release(begin)
        return self._release(self._position - self._table.depth[self._state])

    def flush(self) -> str:
        """The text has ended: what was held back belongs to it, up to a match."""
        if self._table is None or self.matched:
            return ""
        self.matched = self._candidate is not None
        return self._release(self._position if self._candidate is None else self._candidate)

    def _read(self, character: str, table: "_Automaton") -> int | None:
        """Read one character; where the earliest match begins, once that is sure."""
        self._state = state = table.next(self._state, character)
        self._position += 1
        if length := table.longest[state]:
            begin = self._position - length
            self._candidate = begin if self._candidate is None else min(self._candidate, begin)
        # Something that began earlier may still become a stop string; until then nothing is decided.
        if self._candidate is not None and self._position - table.depth[state] >= self._candidate:
            return self._candidate
        return None

    def _release(self, end: int) -> str:
        size = end - self._held_at
        released, self._held = self._held[:size], self._held[size:]
        self._held_at = end
        return released


_ROOT: Final = 0


class _Automaton:
    """The stop strings as one automaton.

    Attributes:
        depth: by state: how many of the last characters begin a stop string.
        longest: by state: the length of the longest stop string that ends here; 0 is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]
        self.longest = [0]
        self._edges: list[dict[str, int]] = [{}]
        self._fallback = [_ROOT]
        for stop in stops:
            self._insert(stop)
        self._link()

    def next(self, state: int, character: str) -> int:
        while True:
            found = self._edges[state].get(character)
            if found is not None:
                return found
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        state = _ROOT
        for character in stop:
            found = self._edges[state].get(character)
            if found is None:
                found = len(self._edges)
                self._edges[state][character] = found
                self._edges.append({})
                self._fallback.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.longest.append(0)
            state = found
        self.longest[state] = len(stop)

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest proper suffix that is a state too."""
        waiting = deque(self._edges[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._edges[state].items():
                fallback = self.next(self._fallback[state], character)
                self._fallback[child] = fallback
                self.longest[child] = self.longest[child] or self.longest[fallback]
                waiting.append(child)
