"""Incremental matcher that cuts a generated text at its earliest stop string.

A pure fold over the pieces of a text. The result does not depend on how the text is cut into pieces, and
released text is never taken back. Text that may be the prefix of a stop string is held back.

The earliest match is the one that *begins* first, as in `min(text.find(stop) for stop in stops)`. With the
stops `abcd` and `bc`, the text `abc` is therefore undecided until its next character.

The matcher is an Aho-Corasick automaton: each character costs constant time for any set of stop strings.
(Clients choose the stop strings. If every piece were searched again, a client could make that cost
milliseconds per token.)
"""

from collections import deque
from collections.abc import Sequence
from typing import Final


class StopMatcher:
    """Cuts a text at the earliest of `stops`.

    Attributes:
        matched: a stop string was found; no more text is released.
    """

    __slots__ = ("_candidate", "_found", "_held", "_held_at", "_position", "_state", "_table", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched = False
        self._table = _Automaton(stops) if stops else None
        self._state = _ROOT
        self._held = ""
        self._held_at = 0  # where in the text `_held` begins
        self._position = 0  # characters read so far
        self._candidate: int | None = None  # where the earliest match so far begins
        self._found = ""  # the stop string that begins there

    @property
    def stop(self) -> str | None:
        """The stop string that was found; None without a match."""
        return self._found if self.matched else None

    def push(self, text: str) -> str:
        """Read a piece; return the text that now certainly precedes every stop string."""
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
        """End the text; return the held-back text, up to a match."""
        if self._table is None or self.matched:
            return ""
        self.matched = self._candidate is not None
        return self._release(self._position if self._candidate is None else self._candidate)

    def _read(self, character: str, table: "_Automaton") -> int | None:
        """Read one character; return the begin of the earliest match once it is certain."""
        self._state = state = table.next(self._state, character)
        self._position += 1
        if length := table.longest[state]:
            begin = self._position - length
            if self._candidate is None or begin < self._candidate:
                self._candidate = begin
                self._found = self._held[begin - self._held_at : self._position - self._held_at]
        # A candidate that began earlier may still become a stop string; until then the match is undecided.
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
    """Aho-Corasick automaton of the stop strings.

    Attributes:
        depth: by state, the number of last characters that are a prefix of a stop string.
        longest: by state, the length of the longest stop string that ends here; 0 is none.
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
        """Set fallbacks, breadth first: each is the longest proper suffix that is also a state."""
        waiting = deque(self._edges[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._edges[state].items():
                fallback = self.next(self._fallback[state], character)
                self._fallback[child] = fallback
                self.longest[child] = self.longest[child] or self.longest[fallback]
                waiting.append(child)
