"""Chunks of a stream: the items that one firing of the consuming node takes.

A policy divides the items into windows, numbered from 0. A window becomes a chunk as soon as all its items
exist. The end of the stream adds exactly one more chunk, the final one, with the items from the start of the
next window on. It may be empty, because the end is not known in advance.

    Fixed(3), 7 items             [0 1 2] [3 4 5] [6]
    Fixed(3), 6 items             [0 1 2] [3 4 5] []
    SlidingWindow(4, 2), 7 items  [0 1 2 3] [2 3 4 5] [4 5 6]
    LeftContext(3, 1), 7 items    [0 1 2] [2 3 4 5] [5 6]
    LeftContext(4, 2, first=1)    [0] [0 1 2] [1 2 3 4 5 6] [5 6 7 8 9 10] ...

So the chunks depend only on the number of items and never on their times, and a replay derives the number of
chunks from the number of items (`chunks_of`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from shared.walks.errors import WalkError

AfterEnd: TypeAlias = Literal["stop", "empty"]
"""The behaviour after the final chunk: the consumer's loop stops, or it gets empty chunks on demand."""

AFTER_END: Final[tuple[AfterEnd, ...]] = ("stop", "empty")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Chunks of `count` items."""

    count: int

    def __post_init__(self) -> None:
        _check_count(self, "count", self.count, 1)

    def span(self, number: int) -> tuple[int, int]:
        """Return the half-open range of window `number`."""
        return number * self.count, (number + 1) * self.count

    def whole(self, items: int) -> int:
        """Return the number of complete windows among so many items."""
        return items // self.count

    def describe(self) -> list[Any]:
        """Return the policy as plain data."""
        return ["fixed", self.count]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Chunks of `window` items, one for every `stride` items, from the first complete window on."""

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
        """Return the half-open range of window `number`."""
        return number * self.stride, number * self.stride + self.window

    def whole(self, items: int) -> int:
        """Return the number of complete windows among so many items."""
        return max(0, (items - self.window) // self.stride + 1)

    def describe(self) -> list[Any]:
        """Return the policy as plain data."""
        return ["sliding_window", self.window, self.stride]


@dataclass(frozen=True, slots=True)
class LeftContext:
    """Chunks of `count` items, each but the first with the `context` items before it.

    With `first`, a smaller number, the first chunk has so many items, and each next one twice as many as the
    one before, up to `count`: so the first comes early, and each is there before the one before it is heard.
    A name means the argument of that name of the consuming walk: `of` the arguments is the policy then.
    """

    count: int
    context: int
    first: int | str = 0

    def __post_init__(self) -> None:
        _check_count(self, "count", self.count, 1)
        _check_count(self, "context", self.context, 0)
        if isinstance(self.first, str):
            return
        _check_count(self, "first", self.first, 0)
        if self.first > self.count:
            raise WalkError(f"{self}: expected a first chunk of at most {self.count} items")

    def of(self, args: Mapping[str, Any]) -> "LeftContext":
        """Return the policy in a walk with these arguments.

        Raises:
            WalkError: the walk lacks the argument, or it is no number of items.
        """
        if not isinstance(self.first, str):
            return self
        if self.first not in args:
            raise WalkError(f"{self}: expected the argument {self.first!r} of the walk, found {sorted(args)}")
        return LeftContext(self.count, self.context, args[self.first])

    def span(self, number: int) -> tuple[int, int]:
        """Return the half-open range of window `number`."""
        return max(0, self._end(number) - self.context), self._end(number + 1)

    def whole(self, items: int) -> int:
        """Return the number of complete windows among so many items."""
        small = sum(1 for number in range(self._doublings) if self._end(number + 1) <= items)
        return small + max(0, items - self._end(self._doublings)) // self.count

    def describe(self) -> list[Any]:
        """Return the policy as plain data."""
        return ["left_context", self.count, self.context, *([self.first] if self.first else [])]

    @property
    def _doublings(self) -> int:
        """The number of chunks that are smaller than `count`."""
        return ((self.count - 1) // self._first).bit_length() if self._first else 0

    @property
    def _first(self) -> int:
        return self.first if isinstance(self.first, int) else 0

    def _end(self, chunks: int) -> int:
        """The items of the first so many chunks, without context."""
        small = min(chunks, self._doublings)
        return self._first * ((1 << small) - 1) + (chunks - small) * self.count


ChunkPolicy: TypeAlias = Fixed | SlidingWindow | LeftContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The items from `start` up to, but not including, `stop`.

    Attributes:
        number: counts the chunks, from 0.
        fresh: the number of its items, at its end, that no earlier chunk contained.
        last: no chunk follows.
    """

    number: int
    start: int
    stop: int
    fresh: int
    last: bool


class Cutter:
    """The division of one stream into chunks by its policy; it counts items and never sees them.

    Attributes:
        ended: the stream has ended, and the final chunk was returned.
        chunks: the number of chunks so far, including empty ones on demand.
    """

    def __init__(self, policy: ChunkPolicy, after_end: AfterEnd = "stop") -> None:
        self.policy = policy
        self.after_end = after_end
        self.ended = False
        self.chunks = 0
        self._items = 0
        self._chunked = 0  # items that are in some chunk

    @property
    def needed(self) -> int:
        """The first item that a later chunk may contain; earlier items may be dropped."""
        return self._items if self.ended else self.policy.span(self.chunks)[0]

    def cut(self, items: int, ended: bool) -> list[StreamChunk]:
        """Return the new chunks, given `items` items in total and whether the stream has ended.

        Raises:
            WalkError: there are fewer items than before, or more after the end; nothing changed.
        """
        if items < self._items or (self.ended and items > self._items):
            so_far = f"ended with {self._items} items" if self.ended else f"had {self._items} items already"
            raise WalkError(
                f"the stream {so_far}, found {items}: a stream only grows, and only until its end"
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
        """Return one more empty chunk after the end of a stream with `after_end="empty"`.

        Raises:
            WalkError: the stream has another `after_end`, or has not ended.
        """
        if self.after_end != "empty" or not self.ended:
            raise WalkError(
                'only a stream with after_end="empty" has empty chunks, and only after its end; this one '
                f"has after_end={self.after_end!r} and has {'' if self.ended else 'not '}ended"
            )
        return self._chunk(self._items, self._items, last=False)

    def _chunk(self, start: int, stop: int, *, last: bool) -> StreamChunk:
        fresh = max(0, stop - max(start, self._chunked))
        chunk = StreamChunk(number=self.chunks, start=start, stop=stop, fresh=fresh, last=last)
        self._chunked = max(self._chunked, stop)
        self.chunks += 1
        return chunk


def policy_of(policy: ChunkPolicy, args: Mapping[str, Any]) -> ChunkPolicy:
    """Return the policy in a walk with these arguments, see `LeftContext`.

    Raises:
        WalkError: the walk lacks an argument, or it has a wrong value.
    """
    return policy.of(args) if isinstance(policy, LeftContext) else policy


def takes_arguments(policy: ChunkPolicy) -> bool:
    """Return whether the policy depends on an argument of the consuming walk."""
    return isinstance(policy, LeftContext) and isinstance(policy.first, str)


def possible_policies(policy: ChunkPolicy) -> list[ChunkPolicy]:
    """Return what the policy may be in a walk, whose arguments are not known."""
    if isinstance(policy, LeftContext) and takes_arguments(policy):
        return [LeftContext(policy.count, policy.context, first) for first in range(policy.count + 1)]
    return [policy]


def chunks_of(policy: ChunkPolicy, items: int) -> int:
    """Return the number of chunks of a stream with so many items, including the final one.

    For a stream with `after_end="empty"` it is the minimum.
    """
    return policy.whole(items) + 1


def _check_count(policy: ChunkPolicy, name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise WalkError(
            f"{type(policy).__name__}: {name} must be an integer of at least {at_least}, not {value!r}"
        )
