"""Consumer side of a stream: numbered items arrive, chunks of items are taken.

    StreamSent ──> ordered by rank and number, duplicates dropped
                      └──> Cutter: the items of the next chunk ──> parts of item batches, to be joined
    items that no later chunk needs ──> credits for the ranks that produced them

Pure. It holds tensors by their handles, or as arrays where this rank produced them, and never reads their
data.

Several ranks may produce one stream, one after the other: their steps run in sequence, and a step is done
only when its items are stored. Items therefore count in the order of their arrival, and each rank numbers its
own items from 0.

The producer bounds the waiting items: it continues only with credits. A credit costs an event, so none is
given while less than half of a window is outstanding. A stream of a few hundred tokens needs no credit.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shared.errors import BugError
from shared.tensors import Handle, nbytes_of
from shared.walks import ChunkPolicy, Cutter, StreamChunk
from workers.data_plane.port import Array

WINDOW_ITEMS: Final = 4096
WINDOW_BYTES: Final = 64 * 1024 * 1024
"""The most items and bytes of a stream in flight or waiting; beyond that its producer is held."""

Items: TypeAlias = Handle | Array
"""A tensor whose first dimension counts items."""


def window_of(policy: ChunkPolicy) -> int:
    """The most items that may be outstanding: a window, or more where the largest chunk needs more."""
    return max(WINDOW_ITEMS, 4 * span_of(policy))


def span_of(policy: ChunkPolicy) -> int:
    """The largest number of items in a chunk."""
    start, stop = policy.span(1 << 30)  # a late chunk: early ones have less context
    return stop - start


def size_of(items: Items) -> int:
    """The size of a tensor in bytes."""
    return items.data.nbytes if isinstance(items, Array) else nbytes_of(items.dtype, items.shape)


@dataclass(slots=True)
class ItemBatch:
    """Items that arrived in one tensor.

    Attributes:
        start: the number of its first item in the stream.
        rank: the rank that produced them; `first` is that rank's own number of the first item.
    """

    start: int
    count: int
    items: Items
    rank: int
    first: int
    nbytes: int


@dataclass(slots=True)
class _Source:
    """One rank that produces items.

    Attributes:
        next: the number of its next item.
        out_of_order: by number, items that arrived before their predecessors (an event was resent).
        ends_at: the total number of items of this rank, once known.
        used: the number of items no longer needed; `credited`, how many of these were credited.
        out_bytes: the size of all items without a credit; `used_bytes`, of those among them no longer needed.
    """

    next: int = 0
    out_of_order: dict[int, Items] = field(default_factory=dict)
    ends_at: int | None = None
    used: int = 0
    credited: int = 0
    out_bytes: int = 0
    used_bytes: int = 0


class StreamConsumer:
    """The consumer of one stream.

    Args:
        policy: for its window.
        cutter: None while the arguments that its chunks depend on are not known (`begin`).

    Attributes:
        chunks: the number of chunks taken; `consumed`, the number of items up to the end of the last chunk.
        abandoned: consumption stopped before the end of the stream.
        item_type: dtype and shape of an item; None before the first item.
    """

    def __init__(self, policy: ChunkPolicy, cutter: Cutter | None) -> None:
        self.items = 0
        self.chunks = 0
        self.consumed = 0
        self.ended = False
        self.abandoned = False
        self.item_type: tuple[str, tuple[int, ...]] | None = None
        self._window = window_of(policy)
        self._cutter = cutter
        self._batches: deque[ItemBatch] = deque()
        self._cut: deque[StreamChunk] = deque()
        self._sources: dict[int, _Source] = {}

    # ---- items in ----------------------------------------------------------------------------------
    def push(self, rank: int, first: int, items: Items | None, *, end: bool = False) -> None:
        """Receive items from `rank`, which numbers the first of them `first`; duplicates change nothing.

        Raises:
            BugError: the tensor is empty, or the items come after the end of the stream, exceed the credit by
                far, or overlap earlier items without being a duplicate.
        """
        source = self._sources.setdefault(rank, _Source())
        if end:
            source.ends_at = first + _count(items) if items is not None else first
        if items is not None and first + _count(items) > source.next:
            self._check_credit(rank, source, first)
            source.out_of_order.setdefault(first, items)
        while (found := source.out_of_order.pop(source.next, None)) is not None:
            self._append(rank, source, found)
        # These items would wait for ever: no chunk can include them, and no later item can follow them.
        if source.out_of_order and (crossing := min(source.out_of_order)) < source.next:
            raise BugError(
                f"rank {rank} sent items from number {crossing} on, but already sent items up to "
                f"{source.next - 1} in other batches; expected a duplicate to hold the same items"
            )
        if source.ends_at is not None and source.next >= source.ends_at:
            self.ended = True
        self._cut_items()

    def begin(self, cutter: Cutter) -> None:
        """Cut the items in this way, from the first on: for a consumer that was made without a cutter."""
        if self._cutter is None:
            self._cutter = cutter
            self._cut_items()

    def _cut_items(self) -> None:
        if self._cutter is not None and not self._cutter.ended:
            self._cut.extend(self._cutter.cut(self.items, self.ended))

    def _append(self, rank: int, source: _Source, items: Items) -> None:
        if self.ended:
            raise BugError(f"rank {rank} sent items after the end of their stream")
        batch = ItemBatch(self.items, _count(items), items, rank, source.next, size_of(items))
        self._batches.append(batch)
        self.item_type = items.dtype, items.shape[1:]
        self.items += batch.count
        source.next += batch.count
        source.out_bytes += batch.nbytes
        self._check_credit(rank, source, source.next)

    def _check_credit(self, rank: int, source: _Source, end: int) -> None:
        if end - source.credited > 2 * self._window:
            raise BugError(
                f"rank {rank} sent {end - source.credited} items of a stream without credit; "
                f"expected at most 2 windows of {self._window}"
            )

    # ---- chunks out --------------------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        """True when a chunk can be taken."""
        if self._cutter is None:
            return False
        return bool(self._cut) or (self._cutter.ended and self._cutter.after_end == "empty")

    def take(self) -> tuple[StreamChunk, list[tuple[ItemBatch, int, int]]]:
        """Return the next chunk and its parts: (batch, start, stop), as positions within the batch.

        The batches stay until `release_used`.
        """
        assert self._cutter is not None, "a stream that is not cut yet is not ready"
        chunk = self._cut.popleft() if self._cut else self._cutter.empty()
        self.chunks += 1
        self.consumed = chunk.stop
        parts = [
            (batch, max(chunk.start - batch.start, 0), min(chunk.stop - batch.start, batch.count))
            for batch in self._batches
            if batch.start < chunk.stop and batch.start + batch.count > chunk.start
        ]
        return chunk, parts

    def release_used(self) -> list[ItemBatch]:
        """Forget and return the batches that no later chunk needs; called when the taken chunk is joined."""
        if self._cutter is None:
            return []
        floor = self._cut[0].start if self._cut else self._cutter.needed
        gone: list[ItemBatch] = []
        for batch in self._batches:
            if batch.start >= floor:
                break
            source = self._sources[batch.rank]
            source.used = batch.first + min(batch.count, floor - batch.start)
        while self._batches and self._batches[0].start + self._batches[0].count <= floor:
            batch = self._batches.popleft()
            self._sources[batch.rank].used_bytes += batch.nbytes
            gone.append(batch)
        return gone

    def stop(self) -> list[ItemBatch]:
        """Stop consuming; forget and return all batches."""
        self.abandoned = self._cutter is None or not self._cutter.ended or bool(self._cut)
        return self.drop()

    def drop(self) -> list[ItemBatch]:
        """Forget and return all batches."""
        gone = list(self._batches)
        self._batches.clear()
        return gone

    # ---- credits -----------------------------------------------------------------------------------
    def credits(self, *, all_of: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the credits that are due: (rank, total number of its items that are used).

        `all_of` is a rank that gets every credit at once, because it costs no event (this rank).
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
        raise BugError(
            f"stream items: expected a tensor of at least one item, found shape {list(items.shape)}"
        )
    return items.shape[0]
