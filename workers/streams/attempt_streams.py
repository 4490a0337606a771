"""Streams of one attempt of a request, as far as this rank produces or consumes them.

    a node here ──> StreamProducer ──┬── consumer is here ──> StreamConsumer ──> chunks ──> a node's input
                                     └── StreamSent ──> the consumer's rank
    StreamTaken <── StreamConsumer             a credit for a producing rank

A stream outlives a step: several steps may produce it, one after the other, and its items may arrive before
the step that consumes them has begun here. Streams end with their attempt.

Consumption may stop before the stream ends: the consuming loop reached its iteration limit, or a node stopped
it. The remaining items are then dropped here, and the producing ranks are notified, so that they stop waiting
for credit.
"""

from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from shared.errors import BugError, DalSegnoError
from shared.events import StreamSent, StreamTaken, StreamTotals
from shared.walks import Cutter, InputPort, StreamChunk, StreamLink, policy_of, takes_arguments
from workers.data_plane.port import Array, TensorStore
from workers.data_plane.step_tensors import put
from workers.generation.engine_client import EngineClient
from workers.orders.out_of_order_buffer import ReceivedEdge
from workers.streams.chunk_assembler import ChunkAssembler
from workers.streams.consumer import ItemBatch, Items, StreamConsumer
from workers.streams.edge_counters import EdgeCounters
from workers.streams.producer import StreamProducer, as_handle

SendNow = Callable[[int, StreamSent | StreamTaken, Callable[[int], None] | None], None]
"""Sends an event to a rank, with a callback once it is stored. A `CapacityError` means: try later."""


class AttemptStreams:
    """All streams of a request in one attempt.

    Args:
        infos: the graph's streams.
        name: `<request>/<attempt>`, the prefix of the scope of its tensors.
        engine: holds and resumes sequences that feed a stream.
        send: sends an event to a rank now.
        send_when_possible: sends an event to a rank as soon as the log accepts it.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self,
        infos: Mapping[InputPort, StreamLink],
        name: str,
        *,
        rank: int,
        store: TensorStore,
        engine: EngineClient,
        send: SendNow,
        send_when_possible: Callable[[int, StreamTaken], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        counts: EdgeCounters,
    ) -> None:
        self.scope = f"{name}/streams"
        self._infos = infos
        self._name = name.replace("/", ".")
        self._rank = rank
        self._store = store
        self._engine = engine
        self._send = send
        self._send_when_possible = send_when_possible
        self._spawn = spawn
        self._counts = counts
        self._chunks = ChunkAssembler(store)
        self._consumers: dict[InputPort, StreamConsumer] = {}
        self._producers: dict[InputPort, StreamProducer] = {}
        self._watchers: dict[InputPort, Callable[[], None]] = {}
        self._failures: dict[InputPort, DalSegnoError] = {}
        self._abandoned: set[InputPort] = set()  # by a consumer on any rank
        self._closed = False

    # ---- from other ranks --------------------------------------------------------------------------
    def receive(self, edge: ReceivedEdge) -> None:
        """Take a stream event of another rank."""
        match edge.event:
            case StreamSent(stream=stream, to=to, index=first, items=items, end=end):
                self._push((stream, to), edge.rank, first, items, end=end)
            case StreamTaken(stream=stream, to=to, closed=True) if (stream, to) in self._infos:
                self._abandon((stream, to))
            case StreamTaken(stream=stream, to=to, taken=used) if (stream, to) in self._producers:
                self._producers[stream, to].credit(used)
            case _:
                pass

    # ---- consuming ---------------------------------------------------------------------------------
    def ready(self, stream: InputPort) -> bool:
        """True when `next_chunk` has a chunk, or an error, to return."""
        return stream in self._failures or self._consumer(stream).ready

    def begin(self, stream: InputPort, args: Mapping[str, Any]) -> None:
        """Note the arguments of the walk that consumes a stream: its chunks may depend on them."""
        info = self._infos[stream]
        if takes_arguments(info.policy):
            self._consumer(stream).begin(Cutter(policy_of(info.policy, args), info.after_end))

    def watch(self, stream: InputPort, callback: Callable[[], None]) -> None:
        """Call `callback` once, as soon as the stream is ready."""
        self._watchers[stream] = callback

    async def next_chunk(self, stream: InputPort) -> tuple[StreamChunk, Array]:
        """Take the next chunk of a ready stream, as a copy.

        Raises:
            LostTensor: a part of it is gone.
            BugError: its items do not match one another, or the stream has failed.
        """
        if stream in self._failures:
            raise self._failures[stream]
        consumer = self._consumer(stream)
        chunk, parts = consumer.take()
        self._counts.chunks += 1
        array = await self._chunks.join(parts, consumer.item_type)
        self._chunks.release(consumer.release_used())
        self._send_credits(stream, consumer)
        return chunk, array

    async def next_items(self, stream: InputPort, limit: int) -> tuple[Array, bool]:
        """Take up to `limit` of the items that have come, stacked; true if no further ones follow.

        For streams that are cut into chunks of one item. Call it on a ready stream.

        Raises:
            LostTensor: a part of them is gone.
            BugError: they do not match one another, or the stream has failed.
        """
        if stream in self._failures:
            raise self._failures[stream]
        consumer = self._consumer(stream)
        parts: list[tuple[ItemBatch, int, int]] = []
        ended = False
        while len(parts) < limit and consumer.ready and not ended:
            chunk, items = consumer.take()
            self._counts.chunks += 1
            parts += items
            ended = not chunk.fresh
        array = await self._chunks.join(parts, consumer.item_type)
        self._chunks.release(consumer.release_used())
        self._send_credits(stream, consumer)
        return array, ended

    def stop_consuming(self, stream: InputPort, producer_ranks: Collection[int]) -> None:
        """End consumption for this attempt; if the stream has not ended, notify the ranks that produce it."""
        if self._closed:
            return
        consumer = self._consumer(stream)
        self._chunks.release(consumer.stop())
        if not consumer.abandoned:
            return  # the stream has ended
        self._watchers.pop(stream, None)
        self._failures.setdefault(
            stream,
            BugError(
                f"stream {stream[0]!r} to node {stream[1]!r}: a step stopped consuming it before its end; "
                "no other step can continue it"
            ),
        )
        for rank in sorted(producer_ranks):
            if rank == self._rank:
                self._abandon(stream)
                continue
            event = StreamTaken(
                id=f"{self._name}.{stream[0]}.{stream[1]}.closed.{rank}",
                stream=stream[0],
                to=stream[1],
                taken=consumer.items,
                closed=True,
            )
            self._spawn(self._send_when_possible(rank, event))

    def totals(self, stream: InputPort) -> StreamTotals:
        """The items and chunks so far; of an abandoned stream, only the items that its chunks included."""
        consumer = self._consumer(stream)
        if consumer.abandoned:
            return StreamTotals(items=consumer.consumed, chunks=consumer.chunks, left=True)
        return StreamTotals(items=consumer.items, chunks=consumer.chunks)

    # ---- producing ---------------------------------------------------------------------------------
    def producer(self, stream: InputPort, consumer_rank: int) -> StreamProducer:
        """The producer of a stream that `consumer_rank` consumes."""
        found = self._producers.get(stream)
        if found is None:
            is_local = consumer_rank == self._rank
            found = self._producers[stream] = StreamProducer(
                self._infos[stream].policy,
                partial(self._put_here if is_local else self._put_to_rank, stream, consumer_rank),
                free=self._store.release,
                hold=partial(self._engine.hold, by=stream),
                resume=partial(self._engine.resume, by=stream),
                in_batches=not is_local,
                **({} if is_local else {"store": partial(self._store_items, stream)}),
            )
            if stream in self._abandoned:
                found.abandon()
        return found

    async def item(self, key: str, array: Array, consumer_rank: int) -> Items:
        """A node's output as one item for `consumer_rank`: with a leading dimension of 1."""
        items = Array(dtype=array.dtype, shape=(1, *array.shape), data=array.data)
        return items if consumer_rank == self._rank else await put(self._store, key, items, self.scope)

    # ---- the end -----------------------------------------------------------------------------------
    def close(self) -> None:
        """End the attempt: send and receive nothing more, and release all items."""
        self._closed = True
        self._watchers.clear()
        for producer in self._producers.values():
            producer.close()
        for consumer in self._consumers.values():
            self._chunks.release(consumer.drop())

    # ---- internals ---------------------------------------------------------------------------------
    def _abandon(self, stream: InputPort) -> None:
        self._abandoned.add(stream)
        if stream in self._producers:
            self._producers[stream].abandon()

    def _consumer(self, stream: InputPort) -> StreamConsumer:
        found = self._consumers.get(stream)
        if found is None:
            if stream not in self._infos:
                raise BugError(f"the model has no stream {stream[0]!r} to node {stream[1]!r}")
            info = self._infos[stream]
            cutter = None if takes_arguments(info.policy) else Cutter(info.policy, info.after_end)
            found = self._consumers[stream] = StreamConsumer(info.policy, cutter)
        return found

    def _push(self, stream: InputPort, rank: int, first: int, items: Items | None, *, end: bool) -> None:
        if self._closed or stream in self._failures:
            return
        try:
            consumer = self._consumer(stream)
            consumer.push(rank, first, items, end=end)
            self._send_credits(stream, consumer)
        except (DalSegnoError, ValueError) as error:  # bad input of another rank must not end this one
            failure = error if isinstance(error, DalSegnoError) else BugError(str(error))
            self._failures[stream] = failure
        if self.ready(stream) and (callback := self._watchers.pop(stream, None)) is not None:
            callback()

    def _store_items(self, stream: InputPort, first: int, items: Array) -> Items:
        """Tensors of a sequence, where another rank can read them; `first` is the number of the first."""
        key = f"{self.scope}/{stream[0]}.{stream[1]}/{self._rank}/{first}"
        return self._store.put(key, items.dtype, items.shape, items.data, scope=self.scope)

    def _put_here(
        self,
        stream: InputPort,
        _consumer_rank: int,
        first: int,
        items: Items | None,
        end: bool,
        stored: Callable[[], None],
    ) -> None:
        self._count(items)
        self._push(stream, self._rank, first, items, end=end)
        stored()

    def _put_to_rank(
        self,
        stream: InputPort,
        consumer_rank: int,
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
        self._send(consumer_rank, event, lambda _: stored())
        self._count(items)

    def _count(self, items: Items | None) -> None:
        self._counts.items += 0 if items is None else items.shape[0]

    def _send_credits(self, stream: InputPort, consumer: StreamConsumer) -> None:
        for rank, used in consumer.credits(all_of=self._rank):
            if rank == self._rank:
                self._producers[stream].credit(used)
                continue
            name = f"{self._name}.{stream[0]}.{stream[1]}"
            event = StreamTaken(id=f"{name}.taken.{rank}.{used}", stream=stream[0], to=stream[1], taken=used)
            self._spawn(self._send_when_possible(rank, event))
