"""Producer side of a stream: it numbers items and sends them, within the consumer's credit.

    tokens and tensors of a sequence ──> batches: the first at once, then every 20 ms ─┐
    node calls, one item each ─────────────────────────────────────────────────────────┴──> the consumer
    credits ──> used items: their tensors are freed, held sequences and nodes continue

While the stream is full, sequences that feed it are held in the engine, and other nodes wait before their
next call. `put` sends items: directly to a consumer on this rank, else by an event, which the log may refuse
for a while.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from shared.errors import BugError, CapacityError, DalSegnoError
from shared.tensors import Handle
from shared.walks import ChunkPolicy
from workers.data_plane.port import Array
from workers.streams.consumer import WINDOW_BYTES, Items, size_of, span_of, window_of

COALESCE_S: Final = 0.02
RETRY_S: Final = 0.25

Put: TypeAlias = Callable[[int, Items | None, bool, Callable[[], None]], None]
"""Sends items: (number of the first, items or None, is it the end, callback once they are stored).
A `CapacityError` means: try later."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Items without a credit yet. `end` is the number after the last of them."""

    end: int
    nbytes: int
    handle: Handle | None


class StreamProducer:
    """The producer of one stream.

    Args:
        put: sends items.
        free: called with the handle of used items.
        hold: called with the key of a sequence that has to wait; `resume`, when it may continue.
        in_batches: send tokens, and tensors of sequences, in batches; else each at once.
        store: puts a batch of tensors where the consumer can read it; called with the number of its first
            item. By default they stay arrays.

    Attributes:
        full: more items or bytes are outstanding than the window allows.
        abandoned: the consumer has stopped; no item is sent any more.
    """

    def __init__(
        self,
        policy: ChunkPolicy,
        put: Put,
        *,
        free: Callable[[Handle], None],
        hold: Callable[[str], None],
        resume: Callable[[str], None],
        in_batches: bool,
        store: Callable[[int, Array], Items] = lambda _, items: items,
    ) -> None:
        self.items = 0
        self.full = False
        self.abandoned = False
        self._window, self._min_outstanding = window_of(policy), 2 * span_of(policy)
        self._put = put
        self._free = free
        self._hold = hold
        self._resume = resume
        self._in_batches = in_batches
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._tokens: list[int] = []
        self._tensors: list[Array] = []
        self._batched_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, Items | None, bool]] = deque()
        self._unstored = 0
        self._out: deque[_Sent] = deque()
        self._out_bytes = 0
        self._used = 0
        self._held: set[str] = set()
        self._room: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._failure: DalSegnoError | None = None
        self._closed = False

    # ---- items -------------------------------------------------------------------------------------
    def add_token(self, token: int, sequence: str) -> None:
        """Add a token of the sequence with key `sequence`; hold that sequence if the stream is full."""
        self.items += 1
        if self.abandoned:
            return
        self._tokens.append(token)
        self._batch(sequence)

    def add_tensors(self, items: Array, sequence: str) -> None:
        """Add tensors of the sequence with key `sequence`, an item each; hold it if the stream is full."""
        self.items += items.shape[0]
        if self.abandoned:
            return
        self._tensors.append(items)
        self._batch(sequence)

    def add(self, item: Items) -> None:
        """Add an item that is a tensor; its first dimension is 1."""
        self._flush()
        self.items += 1
        if not self.abandoned:
            self._send(self.items - 1, item)
        elif (handle := _stored_in(item)) is not None:
            self._free(handle)

    def end(self) -> None:
        """End the stream: no item follows."""
        self._flush()
        if not self.abandoned:
            self._waiting.append((self.items, None, True))
            self._send_waiting()

    def credit(self, used: int) -> None:
        """Take a credit: the consumer has used `used` items in total."""
        self._used = max(self._used, min(used, self.items))
        while self._out and self._out[0].end <= self._used:
            sent = self._out.popleft()
            self._out_bytes -= sent.nbytes
            if sent.handle is not None:
                self._free(sent.handle)
        self._update_full()
        self._send_waiting()
        if not self.full:
            self._release_held()

    def abandon(self) -> None:
        """The consumer has stopped: free and send no more items, and release everything that is held."""
        if self.abandoned:
            return
        self.abandoned = True
        self._tokens.clear()
        self._tensors.clear()
        self._waiting.clear()
        for sent in self._out:
            if sent.handle is not None:
                self._free(sent.handle)
        self._out.clear()
        self._failure = None  # unsent items are no longer needed
        self._update_full()
        self._release_held()
        _wake(self._settled)

    # ---- waiting -----------------------------------------------------------------------------------
    async def wait_for_room(self) -> None:
        """Wait until another item may be added.

        Raises:
            DalSegnoError: the log rejected an item for good.
        """
        while self.full and self._failure is None:
            self._room = self._room if self._room and not self._room.done() else self._loop.create_future()
            await asyncio.shield(self._room)
        self._raise_failure()

    async def wait_stored(self) -> None:
        """Wait until every item is stored; events posted afterwards follow them in the log.

        Raises:
            DalSegnoError: the log rejected an item for good.
        """
        self._flush()
        while (self._unstored or self._waiting) and self._failure is None:
            self._settled = self._loop.create_future()
            await self._settled
        self._raise_failure()

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    # ---- sending -----------------------------------------------------------------------------------
    def _batch(self, sequence: str) -> None:
        """Send what was added, now or with what follows; hold the sequence if the stream is full."""
        if not self._in_batches or self._batched_s is None:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._batched_s + COALESCE_S, self._on_timer)
        self._update_full()
        if self.full and self._failure is None and sequence not in self._held:
            self._held.add(sequence)
            self._hold(sequence)

    def _flush(self) -> None:
        if not self._tokens and not self._tensors:
            return
        self._batched_s = self._loop.time()
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            self._send(self.items - len(tokens), _as_items(tokens))
        if self._tensors:
            added, self._tensors = self._tensors, []
            first = self.items - sum(one.shape[0] for one in added)
            try:
                for tensors in _pieces(_joined(added), self._window):
                    self._send(first, self._store(first, tensors))
                    first += tensors.shape[0]
            except DalSegnoError as error:  # unequal items, a full store
                self._fail(error)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _send(self, first: int, items: Items) -> None:
        sent = _Sent(first + items.shape[0], size_of(items), _stored_in(items))
        self._out.append(sent)
        self._out_bytes += sent.nbytes
        self._update_full()
        self._waiting.append((first, items, False))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and not self._closed and self._failure is None and self._has_credit():
            try:
                self._unstored += 1
                self._put(*self._waiting[0], self._on_stored)
            except CapacityError:
                self._unstored -= 1
                self._loop.call_later(RETRY_S, self._send_waiting)
                return
            except DalSegnoError as error:
                self._unstored -= 1
                self._fail(error)
                return
            self._waiting.popleft()

    def _fail(self, error: DalSegnoError) -> None:
        """Send nothing more: the next wait raises the error, and nothing stays held."""
        self._failure = error
        self._release_held()
        _wake(self._settled)

    def _has_credit(self) -> bool:
        """True if the consumer takes the items that wait first: it refuses more than two windows."""
        first, items, _ = self._waiting[0]
        return items is None or first + items.shape[0] - self._used <= 2 * self._window

    def _on_stored(self) -> None:
        self._unstored -= 1
        _wake(self._settled)

    def _release_held(self) -> None:
        for sequence in self._held:
            self._resume(sequence)
        self._held.clear()
        _wake(self._room)

    def _update_full(self) -> None:
        out = self.items - self._used
        is_ahead = out >= self._min_outstanding and (out > self._window or self._out_bytes > WINDOW_BYTES)
        self.full = is_ahead and not self.abandoned

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _stored_in(items: Items) -> Handle | None:
    """The handle of items in the tensor store, which have to be freed there; else None."""
    return items if isinstance(items, Handle) and items.data is None else None


def _joined(tensors: list[Array]) -> Array:
    """Tensors of consecutive items as one.

    Raises:
        BugError: their items differ in dtype or shape.
    """
    kinds = {(one.dtype, one.shape[1:]) for one in tensors}
    if len(kinds) > 1:
        raise BugError(
            "stream items: expected one dtype and shape for the whole stream, "
            f"found {sorted(map(str, kinds))}"
        )
    if len(tensors) == 1:
        return tensors[0]
    [(dtype, shape)] = kinds
    count = sum(one.shape[0] for one in tensors)
    return Array(dtype=dtype, shape=(count, *shape), data=np.concatenate([one.data for one in tensors]))


def _pieces(items: Array, most: int) -> Iterator[Array]:
    """Items in pieces of at most `most`: a prompt's may be more than a consumer takes at once."""
    count, size = items.shape[0], items.data.nbytes // items.shape[0]
    for start in range(0, count, most):
        stop = min(start + most, count)
        data = items.data[start * size : stop * size]
        yield Array(dtype=items.dtype, shape=(stop - start, *items.shape[1:]), data=data)


def _as_items(tokens: list[int]) -> Array:
    return Array(dtype="int32", shape=(len(tokens),), data=np.array(tokens, dtype="<i4").view(np.uint8))


def as_handle(items: Items, key: str) -> Handle:
    """Items as an event carries them: a handle to the store, or with the data of a small array inline."""
    if isinstance(items, Handle):
        return items
    return Handle(key=key, dtype=items.dtype, shape=items.shape, data=items.data.tobytes())


def _wake(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
