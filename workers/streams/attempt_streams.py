"""The streams of one attempt of a request, as far as this rank makes or takes their items.

They outlive a step: a stream may be fed by several, one after the other, and be on its way before the step
that takes it has begun here. They end with the attempt.

    a node here ──> StreamProducer ──┬── the taker is here ──> StreamConsumer ──> chunks ──> a firing's input
                             └── StreamSent ──> the taker's rank
    StreamTaken <── StreamConsumer                            a credit for a rank

A taker may be done before its stream is: its loop has run as often as it may, or a node stopped it. Then the
rest is nobody's: it is dropped here, and those who make it are told, so that they are held for it no more.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from shared.errors import BugError, DalSegnoError, TensorGone
from shared.events import StreamSent, StreamTaken, StreamTotals
from shared.tensors import Handle
from shared.walks import Chunk, Cutter, InputPort, StreamInfo
from workers.data_plane.port import Array, Bytes, TensorStore
from workers.data_plane.step_tensors import IN_THREAD_BYTES, LostTensor, check, put
from workers.generation.engine_client import EngineClient
from workers.orders.out_of_order_buffer import ReceivedEdge
from workers.streams.consumer import ItemBatch, Items, StreamConsumer
from workers.streams.producer import StreamProducer, as_handle

_TOKEN: Final[tuple[str, tuple[int, ...]]] = ("int32", ())
"""What the items of a stream are taken for that ended without any."""

Tell = Callable[[int, StreamSent | StreamTaken, Callable[[int], None] | None], None]
"""Tell a rank; a `CapacityError` means not now."""


@dataclass(slots=True)
class EdgeCounters:
    """What `shared.meters.EdgeMeters` tells, as it goes up."""

    told: int = 0
    heard: int = 0
    items: int = 0
    chunks: int = 0


class AttemptStreams:
    """All streams of a request in one attempt.

    Args:
        infos: the graph's streams.
        name: `<request>/<attempt>`: what its tensors' scope begins with.
        rank: this one.
        tell: posts an event to a rank.
        spawn: runs a coroutine that nobody waits for.
        counts: where items and chunks are counted.
    """

    def __init__(
        self,
        infos: Mapping[InputPort, StreamInfo],
        name: str,
        *,
        rank: int,
        store: TensorStore,
        rows: EngineClient,
        tell: Tell,
        tell_when_possible: Callable[[int, StreamTaken], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        counts: "EdgeCounters",
    ) -> None:
        self.scope = f"{name}/streams"
        self._infos = infos
        self._name = name.replace("/", ".")
        self._rank = rank
        self._store = store
        self._rows = rows
        self._tell = tell
        self._tell_when_possible = tell_when_possible
        self._spawn = spawn
        self._counts = counts
        self._inlets: dict[InputPort, StreamConsumer] = {}
        self._outlets: dict[InputPort, StreamProducer] = {}
        self._looks: dict[str, tuple[Handle, Bytes]] = {}
        self._watchers: dict[InputPort, Callable[[], None]] = {}
        self._failures: dict[InputPort, DalSegnoError] = {}
        self._left: set[InputPort] = set()  # here or elsewhere: what is made of them is nobody's
        self._closed = False

    # ---- from other ranks --------------------------------------------------------------------------
    def hear(self, heard: ReceivedEdge) -> None:
        """Take what another rank tells of a stream."""
        match heard.event:
            case StreamSent(stream=stream, to=to, index=first, items=items, end=end):
                self._push((stream, to), heard.rank, first, items, end=end)
            case StreamTaken(stream=stream, to=to, closed=True) if (stream, to) in self._infos:
                self._close_outlet((stream, to))
            case StreamTaken(stream=stream, to=to, taken=taken) if (stream, to) in self._outlets:
                self._outlets[stream, to].taken(taken)
            case _:
                pass

    # ---- taking ------------------------------------------------------------------------------------
    def ready(self, stream: InputPort) -> bool:
        """Whether `chunk` has one to give, or an error."""
        return stream in self._failures or self._inlet(stream).ready

    def watch(self, stream: InputPort, callback: Callable[[], None]) -> None:
        """Call back once, as soon as there is a chunk."""
        self._watchers[stream] = callback

    async def chunk(self, stream: InputPort) -> tuple[Chunk, Array]:
        """The next chunk, whose bytes are nobody else's; to be asked for when one is ready.

        Raises:
            LostTensor: a part of it is gone.
            BugError: its items do not fit one another, or the stream is broken.
        """
        if stream in self._failures:
            raise self._failures[stream]
        inlet = self._inlet(stream)
        chunk, parts = inlet.take()
        self._counts.chunks += 1
        array = await self._joined(parts, inlet.like or _TOKEN)
        for piece in inlet.used():
            self._let_go(piece)
        self._credit(stream, inlet)
        return chunk, array

    def leave(self, stream: InputPort, feeders: Collection[int]) -> None:
        """The taker is done, and nobody takes after it: the ranks that feed the stream need not go on."""
        if self._closed:
            return
        inlet = self._inlet(stream)
        for piece in inlet.leave():
            self._let_go(piece)
        if not inlet.left:
            return  # it has come to its end
        self._watchers.pop(stream, None)
        message = f"stream {stream[0]!r} to node {stream[1]!r} was left before its end by a step that took it"
        self._failures.setdefault(stream, BugError(f"{message}; no other step can go on with it"))
        for rank in sorted(feeders):
            if rank == self._rank:
                self._close_outlet(stream)
                continue
            event = StreamTaken(
                id=f"{self._name}.{stream[0]}.{stream[1]}.closed.{rank}",
                stream=stream[0],
                to=stream[1],
                taken=inlet.items,
                closed=True,
            )
            self._spawn(self._tell_when_possible(rank, event))

    def totals(self, stream: InputPort) -> StreamTotals:
        """What came in so far; of a stream that was left, what its chunks had."""
        inlet = self._inlet(stream)
        if inlet.left:
            return StreamTotals(items=inlet.had, chunks=inlet.chunks, left=True)
        return StreamTotals(items=inlet.items, chunks=inlet.chunks)

    # ---- making ------------------------------------------------------------------------------------
    def outlet(self, stream: InputPort, taker: int) -> StreamProducer:
        """Where this rank puts the items it makes of a stream that rank `taker` takes."""
        found = self._outlets.get(stream)
        if found is None:
            found = self._outlets[stream] = StreamProducer(
                self._infos[stream].policy,
                partial(self._put_here if taker == self._rank else self._send, stream, taker),
                free=self._store.release,
                hold=partial(self._rows.hold, by=stream),
                resume=partial(self._rows.resume, by=stream),
                in_batches=taker != self._rank,
            )
            if stream in self._left:
                found.leave()
        return found

    async def item(self, key: str, array: Array, taker: int) -> Items:
        """One firing's output as an item for `taker`: with a dimension of 1 before its own."""
        items = Array(dtype=array.dtype, shape=(1, *array.shape), data=array.data)
        return items if taker == self._rank else await put(self._store, key, items, self.scope)

    # ---- the end -----------------------------------------------------------------------------------
    def close(self) -> None:
        """The attempt is over: nothing goes out or comes in any more, and nothing is kept."""
        self._closed = True
        self._watchers.clear()
        for outlet in self._outlets.values():
            outlet.close()
        for inlet in self._inlets.values():
            for piece in inlet.drop():
                self._let_go(piece)

    # ---- within ------------------------------------------------------------------------------------
    def _close_outlet(self, stream: InputPort) -> None:
        self._left.add(stream)
        if stream in self._outlets:
            self._outlets[stream].leave()

    def _inlet(self, stream: InputPort) -> StreamConsumer:
        found = self._inlets.get(stream)
        if found is None:
            if stream not in self._infos:
                raise BugError(f"there is no stream {stream[0]!r} to node {stream[1]!r}")
            info = self._infos[stream]
            found = self._inlets[stream] = StreamConsumer(info.policy, Cutter(info.policy, info.after_end))
        return found

    def _push(self, stream: InputPort, rank: int, first: int, items: Items | None, *, end: bool) -> None:
        if self._closed or stream in self._failures:
            return
        try:
            inlet = self._inlet(stream)
            inlet.push(rank, first, items, end=end)
            self._credit(stream, inlet)
        except (DalSegnoError, ValueError) as error:  # what another rank wrote must not end this one
            failure = error if isinstance(error, DalSegnoError) else BugError(str(error))
            self._failures[stream] = failure
        if self.ready(stream) and (callback := self._watchers.pop(stream, None)) is not None:
            callback()

    def _put_here(
        self,
        stream: InputPort,
        _taker: int,
        first: int,
        items: Items | None,
        end: bool,
        stored: Callable[[], None],
    ) -> None:
        self._count(items)
        self._push(stream, self._rank, first, items, end=end)
        stored()

    def _send(
        self,
        stream: InputPort,
        taker: int,
        first: int,
        items: Items | None,
        end: bool,
        stored: Callable[[], None],
    ) -> None:
        name = f"{self._name}.{stream[0]}.{stream[1]}.{first}"
        event = StreamSent(
            id=f"{name}.{'end' if end else 'sent'}.{self._rank}",
            index=first,
            stream=stream[0],
            to=stream[1],
            items=None if items is None else as_handle(items, f"{self.scope}/{stream[0]}/{first}"),
            end=end,
        )
        self._tell(taker, event, lambda _: stored())
        self._count(items)

    def _count(self, items: Items | None) -> None:
        self._counts.items += 0 if items is None else items.shape[0]

    def _credit(self, stream: InputPort, inlet: StreamConsumer) -> None:
        for rank, used in inlet.credits(all_of=self._rank):
            if rank == self._rank:
                self._outlets[stream].taken(used)
                continue
            name = f"{self._name}.{stream[0]}.{stream[1]}"
            event = StreamTaken(id=f"{name}.taken.{rank}.{used}", stream=stream[0], to=stream[1], taken=used)
            self._spawn(self._tell_when_possible(rank, event))

    async def _joined(
        self, parts: Sequence[tuple[ItemBatch, int, int]], like: tuple[str, tuple[int, ...]]
    ) -> Array:
        """Items of pieces, one after the other, copied; of none, an empty tensor `like` them."""
        if not parts:
            return Array(dtype=like[0], shape=(0, *like[1]), data=np.empty(0, dtype=np.uint8))
        kinds = {(piece.items.dtype, piece.items.shape[1:]) for piece, _, _ in parts}
        if len(kinds) > 1:
            raise BugError(f"the items of a stream differ in what they are: {sorted(map(str, kinds))}")
        [(dtype, shape)] = kinds
        views: list[Bytes] = []
        for piece, start, stop in parts:
            data = await self._bytes(piece.items)
            size = data.nbytes // piece.count
            views.append(data[start * size : stop * size])
        is_large = sum(view.nbytes for view in views) > IN_THREAD_BYTES
        joined = await asyncio.to_thread(np.concatenate, views) if is_large else np.concatenate(views)
        for piece, _, _ in parts:
            if isinstance(piece.items, Handle) and piece.items.data is None:
                check(self._store, piece.items)
        count = sum(stop - start for _, start, stop in parts)
        return Array(dtype=dtype, shape=(count, *shape), data=joined)

    async def _bytes(self, items: Items) -> Bytes:
        if isinstance(items, Array):
            return items.data
        if items.data is not None:
            return np.frombuffer(items.data, dtype=np.uint8)
        if items.key not in self._looks:
            try:
                self._looks[items.key] = (items, await self._store.get(items))
            except TensorGone as error:
                raise LostTensor(items, error.message) from error
        return self._looks[items.key][1]

    def _let_go(self, piece: ItemBatch) -> None:
        if isinstance(piece.items, Handle) and self._looks.pop(piece.items.key, None) is not None:
            self._store.release(piece.items)
