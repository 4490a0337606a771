"""The producer's side of a stream: items out, with numbers, no more of them than the consumer has credit for.

    tokens of a row ──> batches: the first at once, then every 20 ms ─┐
    firings of other nodes, one item each ────────────────────────────┴──> the consumer's rank, or this one
    credits ──> items that are used: their tensors are freed, who was held goes on

Whether it is full is what its producer asks: a row is held in the engine, any other node does not fire on.
`put` is how items leave: straight into the inlet where the consumer is on this rank, else by an event, which
the log may refuse for a while.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from shared.errors import CapacityError, DalSegnoError
from shared.tensors import Handle
from shared.walks import ChunkPolicy
from workers.data_plane.port import Array
from workers.streams.consumer import WINDOW_BYTES, Items, size_of, span_of, window_of

COALESCE_S: Final = 0.02
RETRY_S: Final = 0.25

Put: TypeAlias = Callable[[int, Items | None, bool, Callable[[], None]], None]
"""Send items on: the number of the first, the items, whether it is the end, and what to call when they are
stored. A `CapacityError` means not now."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Items that no credit came for. `behind` is the number of the first behind them."""

    behind: int
    nbytes: int
    handle: Handle | None


class StreamProducer:
    """One stream, going out.

    Args:
        put: sends items on.
        free: called with the handle of items that are used.
        hold: called with a row that is to wait, and `resume` with one that may go on.
        in_batches: tokens are sent in batches; else each at once.

    Attributes:
        items: how many were made.
        full: more is out than may be.
        left: nobody takes them any more.
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
    ) -> None:
        self.items = 0
        self.full = False
        self.left = False
        self._window, self._least = window_of(policy), 2 * span_of(policy)
        self._put_on = put
        self._free = free
        self._hold = hold
        self._resume = resume
        self._in_batches = in_batches
        self._loop = asyncio.get_running_loop()
        self._tokens: list[int] = []
        self._batched_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, Items | None, bool]] = deque()
        self._unstored = 0
        self._out: deque[_Sent] = deque()
        self._out_bytes = 0
        self._taken = 0
        self._held: set[str] = set()
        self._room: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._failure: DalSegnoError | None = None
        self._closed = False

    # ---- items -------------------------------------------------------------------------------------
    def add_token(self, token: int, row: str) -> None:
        """A token of the row `row`, which is held where there are too many."""
        self.items += 1
        if self.left:
            return
        self._tokens.append(token)
        if not self._in_batches or self._batched_s is None:
            self._flush_tokens()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._batched_s + COALESCE_S, self._on_timer)
        self._measure()
        if self.full and self._failure is None and row not in self._held:
            self._held.add(row)
            self._hold(row)

    def add(self, item: Items) -> None:
        """An item that is a tensor; its first dimension is 1."""
        self._flush_tokens()
        self.items += 1
        if not self.left:
            self._send(self.items - 1, item)
        elif (handle := _stored_in(item)) is not None:
            self._free(handle)

    def end(self) -> None:
        """No item follows."""
        self._flush_tokens()
        if not self.left:
            self._waiting.append((self.items, None, True))
            self._send_waiting()

    def taken(self, count: int) -> None:
        """The consumer has used so many items, in all."""
        self._taken = max(self._taken, min(count, self.items))
        while self._out and self._out[0].behind <= self._taken:
            sent = self._out.popleft()
            self._out_bytes -= sent.nbytes
            if sent.handle is not None:
                self._free(sent.handle)
        self._measure()
        if not self.full:
            self._let_go()

    def leave(self) -> None:
        """Nobody takes items any more: keep none, send none, and hold nobody."""
        if self.left:
            return
        self.left = True
        self._tokens.clear()
        self._waiting.clear()
        for sent in self._out:
            if sent.handle is not None:
                self._free(sent.handle)
        self._out.clear()
        self._failure = None  # what could not be sent need not be
        self._measure()
        self._let_go()
        _wake(self._settled)

    # ---- waiting -----------------------------------------------------------------------------------
    async def room(self) -> None:
        """Wait until another item may be made.

        Raises:
            DalSegnoError: the log does not take its items, ever.
        """
        while self.full and self._failure is None:
            self._room = self._room if self._room and not self._room.done() else self._loop.create_future()
            await asyncio.shield(self._room)
        self._raise_failure()

    async def stored(self) -> None:
        """Wait until every item is stored, so that what is told next is behind them.

        Raises:
            DalSegnoError: the log does not take its items, ever.
        """
        self._flush_tokens()
        while (self._unstored or self._waiting) and self._failure is None:
            self._settled = self._loop.create_future()
            await self._settled
        self._raise_failure()

    def close(self) -> None:
        """Send nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    # ---- sending -----------------------------------------------------------------------------------
    def _flush_tokens(self) -> None:
        if not self._tokens:
            return
        tokens, self._tokens = self._tokens, []
        self._batched_s = self._loop.time()
        self._send(self.items - len(tokens), _as_items(tokens))

    def _on_timer(self) -> None:
        self._timer = None
        self._flush_tokens()

    def _send(self, first: int, items: Items) -> None:
        sent = _Sent(first + items.shape[0], size_of(items), _stored_in(items))
        self._out.append(sent)
        self._out_bytes += sent.nbytes
        self._measure()
        self._waiting.append((first, items, False))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and not self._closed and self._failure is None:
            try:
                self._unstored += 1
                self._put_on(*self._waiting[0], self._stored)
            except CapacityError:
                self._unstored -= 1
                self._loop.call_later(RETRY_S, self._send_waiting)
                return
            except DalSegnoError as error:
                self._unstored -= 1
                self._failure = error  # told by who waits here next; nobody is held for it
                self._let_go()
                _wake(self._settled)
                return
            self._waiting.popleft()

    def _stored(self) -> None:
        self._unstored -= 1
        _wake(self._settled)

    def _let_go(self) -> None:
        for row in self._held:
            self._resume(row)
        self._held.clear()
        _wake(self._room)

    def _measure(self) -> None:
        out = self.items - self._taken
        is_ahead = out >= self._least and (out > self._window or self._out_bytes > WINDOW_BYTES)
        self.full = is_ahead and not self.left

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _stored_in(items: Items) -> Handle | None:
    """The handle of items that are in the store, and are to be freed there."""
    return items if isinstance(items, Handle) and items.data is None else None


def _as_items(tokens: list[int]) -> Array:
    return Array(dtype="int32", shape=(len(tokens),), data=np.array(tokens, dtype="<i4").view(np.uint8))


def as_handle(items: Items, key: str) -> Handle:
    """Items as an event carries them; those of a small array ride in it."""
    if isinstance(items, Handle):
        return items
    return Handle(key=key, dtype=items.dtype, shape=items.shape, data=items.data.tobytes())


def _wake(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
