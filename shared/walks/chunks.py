"""Chunks: how the items of a stream become what one firing of its consumer takes.

A policy lays windows over the items, numbered from 0. A window is cut as soon as its items are there, and
at the end of the stream comes exactly one chunk more, the final one: what is left from where the next
window would have begun. It may be empty, for nobody could know before the end that it would be.

    Fixed(3), 7 items             [0 1 2] [3 4 5] [6]
    Fixed(3), 6 items             [0 1 2] [3 4 5] []
    SlidingWindow(4, 2), 7 items  [0 1 2 3] [2 3 4 5] [4 5 6]
    LeftContext(3, 1), 7 items    [0 1 2] [2 3 4 5] [5 6]

So the cut follows from the number of items alone, never from when they came, and a replay knows from
that number how many chunks there were (`chunks_of`).
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from shared.walks.errors import WalkError

AfterEnd: TypeAlias = Literal["stop", "empty"]
"""What a consumer gets behind the final chunk: nothing, for its loop stops; or empty chunks, on demand."""

AFTER_END: Final[tuple[AfterEnd, ...]] = ("stop", "empty")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every `count` items are a chunk."""

    count: int

    def __post_init__(self) -> None:
        _check_count(self, "count", self.count, 1)

    def span(self, number: int) -> tuple[int, int]:
        """The first item of window `number`, and the one behind its last."""
        return number * self.count, (number + 1) * self.count

    def whole(self, items: int) -> int:
        """How many windows are whole with so many items."""
        return items // self.count

    def describe(self) -> list[Any]:
        """The policy as plain data."""
        return ["fixed", self.count]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Every `stride` items the last `window` of them are a chunk, from when there are so many."""

    window: int
    stride: int

    def __post_init__(self) -> None:
        _check_count(self, "window", self.window, 1)
        _check_count(self, "stride", self.stride, 1)
        if self.stride > self.window:
            raise WalkError(
                f"{self}: the stride must not exceed the window, or some items would be in no chunk"
            )

    def span(self, number: int) -> tuple[int, int]:
        """The first item of window `number`, and the one behind its last."""
        return number * self.stride, number * self.stride + self.window

    def whole(self, items: int) -> int:
        """How many windows are whole with so many items."""
        return max(0, (items - self.window) // self.stride + 1)

    def describe(self) -> list[Any]:
        """The policy as plain data."""
        return ["sliding_window", self.window, self.stride]


@dataclass(frozen=True, slots=True)
class LeftContext:
    """Every `count` items are a chunk, each but the first with the `context` items before it."""

    count: int
    context: int

    def __post_init__(self) -> None:
        _check_count(self, "count", self.count, 1)
        _check_count(self, "context", self.context, 0)

    def span(self, number: int) -> tuple[int, int]:
        """The first item of window `number`, and the one behind its last."""
        return max(0, number * self.count - self.context), (number + 1) * self.count

    def whole(self, items: int) -> int:
        """How many windows are whole with so many items."""
        return items // self.count

    def describe(self) -> list[Any]:
        """The policy as plain data."""
        return ["left_context", self.count, self.context]


ChunkPolicy: TypeAlias = Fixed | SlidingWindow | LeftContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The items from `start` up to, not including, `stop`.

    Attributes:
        number: from 0, in order.
        fresh: how many of its items, the last ones, no chunk before it had.
        last: no chunk follows.
    """

    number: int
    start: int
    stop: int
    fresh: int
    last: bool


class Cutter:
    """One stream's items, cut by its policy; knows how many there are, and never what they are.

    Attributes:
        ended: no item follows, and the final chunk is cut.
        chunks: how many were cut so far, those on demand included.
    """

    def __init__(self, policy: ChunkPolicy, after_end: AfterEnd = "stop") -> None:
        self.policy = policy
        self.after_end = after_end
        self.ended = False
        self.chunks = 0
        self._items = 0
        self._had = 0  # items that are in some chunk

    @property
    def needed(self) -> int:
        """The first item that a later chunk may have: those before it may be forgotten."""
        return self._items if self.ended else self.policy.span(self.chunks)[0]

    def cut(self, items: int, ended: bool) -> list[StreamChunk]:
        """The chunks that follow from there being `items` items, in all, and from whether it is all.

        Raises:
            WalkError: fewer items than before, or more behind the end; nothing changed.
        """
        if items < self._items or (self.ended and items > self._items):
            so_far = f"ended with {self._items} items" if self.ended else f"had {self._items} items already"
            raise WalkError(
                f"the stream {so_far}; found {items}: a stream only grows, and only up to its end"
            )
        self._items = items
        if self.ended:
            return []
        chunks = []
        start, stop = self.policy.span(self.chunks)
        while stop <= items:
            chunks.append(self._chunk(start, stop, last=False))
            start, stop = self.policy.span(self.chunks)
        if ended:
            self.ended = True
            chunks.append(self._chunk(start, items, last=self.after_end == "stop"))
        return chunks

    def empty(self) -> StreamChunk:
        """One empty chunk more, behind the end of a stream that gives them.

        Raises:
            WalkError: it does not, or has not ended.
        """
        if self.after_end != "empty" or not self.ended:
            raise WalkError(
                'only a stream with after_end="empty" gives empty chunks, and only behind its end; this one '
                f"has after_end={self.after_end!r} and has {'' if self.ended else 'not '}ended"
            )
        return self._chunk(self._items, self._items, last=False)

    def _chunk(self, start: int, stop: int, *, last: bool) -> StreamChunk:
        fresh = max(0, stop - max(start, self._had))
        chunk = StreamChunk(number=self.chunks, start=start, stop=stop, fresh=fresh, last=last)
        self._had = max(self._had, stop)
        self.chunks += 1
        return chunk


def chunks_of(policy: ChunkPolicy, items: int) -> int:
    """How many chunks a stream of so many items comes to, the final one included.

    A stream with `after_end="empty"` comes to at least so many.
    """
    return policy.whole(items) + 1


def _check_count(policy: ChunkPolicy, name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise WalkError(
            f"{type(policy).__name__}: {name} must be an integer of at least {at_least}, not {value!r}"
        )
