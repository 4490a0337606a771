"""The consumer's side of a stream: items come in with numbers, chunks go out.

    StreamSent ──> in order, each item once, by the rank it is from
                      └──> Cutter: which items the next chunk has ──> pieces of tensors, to be joined
    items that no later chunk needs ──> credits for the ranks that made them

Pure. It knows tensors by their handles, or as arrays where they were made on this rank, and looks into none.

Ranks that feed one stream do so one after the other, for their steps follow one another and a step is done
only when its items are stored; so items count in the order in which they come, and each rank numbers its own
from 0.

What waits is bounded by the producer, which goes on only with credits. A credit costs an event, so none is
given while less than half of a window is out: a stream of a few hundred tokens needs none at all.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shared.errors import BugError
from shared.tensors import Handle, nbytes_of
from shared.walks import Chunk, ChunkPolicy, Cutter
from workers.data_plane.port import Array

WINDOW_ITEMS: Final = 4096
WINDOW_BYTES: Final = 64 * 1024 * 1024
"""So much of a stream may be on its way, or wait, before its producer is held."""

Items: TypeAlias = Handle | Array
"""A tensor whose first dimension counts items."""


def window_of(policy: ChunkPolicy) -> int:
    """How many items may be out: a window, and never so few that no chunk could come of them."""
    return max(WINDOW_ITEMS, 4 * span_of(policy))


def span_of(policy: ChunkPolicy) -> int:
    """The most items a chunk has."""
    start, stop = policy.span(1 << 30)  # far from the beginning, where a context is not whole yet
    return stop - start


def size_of(items: Items) -> int:
    """How many bytes a tensor has."""
    return items.data.nbytes if isinstance(items, Array) else nbytes_of(items.dtype, items.shape)


@dataclass(slots=True)
class ItemBatch:
    """Items that came together.

    Attributes:
        start: the number, in the stream, of its first item.
        count: how many they are.
        rank: which made them, and `first` what it calls the first of them.
    """

    start: int
    count: int
    items: Items
    rank: int
    first: int
    nbytes: int


@dataclass(slots=True)
class _Source:
    """One rank that makes items.

    Attributes:
        next: the number of its next item.
        early: what came ahead of its turn, by number: an event was sent again.
        ends_at: how many items it makes.
        used: how many are not needed any more, and `credited` how many of those it was told of.
        out_bytes: how large all are that it was given no credit for.
    """

    next: int = 0
    early: dict[int, Items] = field(default_factory=dict)
    ends_at: int | None = None
    used: int = 0
    credited: int = 0
    out_bytes: int = 0
    used_bytes: int = 0


class StreamConsumer:
    """One stream, coming in.

    Attributes:
        items: how many there are.
        chunks: how many were taken, and `had` how many of the items were in them.
        ended: no item follows.
        left: nobody takes chunks any more, although there are, or could be, some.
        like: dtype and shape of an item; None before there is one.
    """

    def __init__(self, policy: ChunkPolicy, cutter: Cutter) -> None:
        self.items = 0
        self.chunks = 0
        self.had = 0
        self.ended = False
        self.left = False
        self.like: tuple[str, tuple[int, ...]] | None = None
        self._window = window_of(policy)
        self._cutter = cutter
        self._pieces: deque[ItemBatch] = deque()
        self._cut: deque[Chunk] = deque()
        self._sources: dict[int, _Source] = {}

    # ---- items in ----------------------------------------------------------------------------------
    def push(self, rank: int, first: int, items: Items | None, *, end: bool = False) -> None:
        """Take items, of which `rank` calls the first one `first`; copies change nothing.

        Raises:
            BugError: items behind the end, far more than there is credit for, some of which came before
                together with others, or no items.
        """
        source = self._sources.setdefault(rank, _Source())
        if end:
            source.ends_at = first + _count(items) if items is not None else first
        if items is not None and first + _count(items) > source.next:
            self._check_credit(rank, source, first)
            source.early.setdefault(first, items)
        while (found := source.early.pop(source.next, None)) is not None:
            self._append(rank, source, found)
        # Else they would wait for ever: nothing is cut of them, and nothing behind them follows on.
        if source.early and (crossing := min(source.early)) < source.next:
            raise BugError(
                f"rank {rank} sent items from number {crossing} on, but had sent up to {source.next - 1} in "
                "other pieces before; a copy is of the same items"
            )
        if source.ends_at is not None and source.next >= source.ends_at:
            self.ended = True
        if not self._cutter.ended:
            self._cut.extend(self._cutter.cut(self.items, self.ended))

    def _append(self, rank: int, source: _Source, items: Items) -> None:
        if self.ended:
            raise BugError(f"rank {rank} sent items behind the end of their stream")
        piece = ItemBatch(self.items, _count(items), items, rank, source.next, size_of(items))
        self._pieces.append(piece)
        self.like = items.dtype, items.shape[1:]
        self.items += piece.count
        source.next += piece.count
        source.out_bytes += piece.nbytes
        self._check_credit(rank, source, source.next)

    def _check_credit(self, rank: int, source: _Source, behind: int) -> None:
        if behind - source.credited > 2 * self._window:
            raise BugError(
                f"rank {rank} sent {behind - source.credited} items of a stream that it has no credit "
                f"for; a window is {self._window}"
            )

    # ---- chunks out --------------------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        """Whether there is a chunk to take."""
        return bool(self._cut) or (self._cutter.ended and self._cutter.after_end == "empty")

    def take(self) -> tuple[Chunk, list[tuple[ItemBatch, int, int]]]:
        """The next chunk, and what it is made of: of each piece, the items from one place up to another.

        The pieces stay until `used`.
        """
        chunk = self._cut.popleft() if self._cut else self._cutter.empty()
        self.chunks += 1
        self.had = chunk.stop
        parts = [
            (piece, max(chunk.start - piece.start, 0), min(chunk.stop - piece.start, piece.count))
            for piece in self._pieces
            if piece.start < chunk.stop and piece.start + piece.count > chunk.start
        ]
        return chunk, parts

    def used(self) -> list[ItemBatch]:
        """The chunk that was taken is made: the pieces that nothing needs any more, which are forgotten."""
        floor = self._cut[0].start if self._cut else self._cutter.needed
        gone: list[ItemBatch] = []
        for piece in self._pieces:
            if piece.start >= floor:
                break
            source = self._sources[piece.rank]
            source.used = piece.first + min(piece.count, floor - piece.start)
        while self._pieces and self._pieces[0].start + self._pieces[0].count <= floor:
            piece = self._pieces.popleft()
            self._sources[piece.rank].used_bytes += piece.nbytes
            gone.append(piece)
        return gone

    def leave(self) -> list[ItemBatch]:
        """The taker is done: the pieces that nobody reads any more, which are forgotten."""
        self.left = not self._cutter.ended or bool(self._cut)
        return self.drop()

    def drop(self) -> list[ItemBatch]:
        """Forget every piece: nobody takes chunks any more."""
        gone = list(self._pieces)
        self._pieces.clear()
        return gone

    # ---- credits -----------------------------------------------------------------------------------
    def credits(self, *, all_of: int | None = None) -> Iterator[tuple[int, int]]:
        """The ranks that are to be told now that items are used, and how many of theirs are, in all.

        `all_of` is a rank that is told of each, because that costs nothing.
        """
        for rank, source in self._sources.items():
            out = source.next - source.credited
            is_due = out >= self._window // 2 or source.out_bytes >= WINDOW_BYTES // 2
            if source.used > source.credited and (is_due or rank == all_of):
                source.credited = source.used
                source.out_bytes -= source.used_bytes
                source.used_bytes = 0
                yield rank, source.used


def _count(items: Items) -> int:
    if not items.shape or items.shape[0] < 1:
        raise BugError(f"a stream's items are a tensor of at least one item, found {list(items.shape)}")
    return items.shape[0]
