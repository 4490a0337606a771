"""Streams of one step: node outputs become stream items, and this rank's consumption is counted and ended.

    tokens of a sequence ──> one item each, when it is sampled     (`on_item`)
    its tensors          ──> one item for each row                 (`on_tensors`)
    a node call          ──> one item for each of its streams      (`send`)

The streams outlive the step and belong to the attempt (`workers.streams.attempt_streams`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from models.base import TOKEN
from shared.events import StreamTotals
from shared.walks import CompiledNode, CompiledWalk, InputPort, StreamingEdge
from workers.data_plane.port import Array
from workers.data_plane.step_tensors import StepTensors, Value
from workers.execution.step_placement import StepPlacement
from workers.generation.sequence_handle import OnItem, OnTensors
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams
from workers.streams.producer import StreamProducer


class StepStreams:
    """The stream ends of one step on this rank; `streams` is None where the model has none."""

    def __init__(
        self, streams: AttemptStreams | None, key: StepKey, placement: StepPlacement, tensors: StepTensors
    ) -> None:
        self._streams = streams
        self._key = key
        self._placement = placement
        self._tensors = tensors
        self._producers: dict[InputPort, StreamProducer] = {}

    # ---- producing ---------------------------------------------------------------------------------
    async def wait_for_room(self, node: CompiledNode) -> None:
        """Wait until a node may add an item to each of its streams."""
        for edge in node.streaming:
            await self._producer((edge.name, edge.to)).wait_for_room()

    async def send(self, node: CompiledNode, values: Mapping[str, Value], key: str) -> None:
        """Send a node's values, one item to each of its streams; `key` is the key prefix of their tensors."""
        assert self._streams is not None, "a model with streams has them"
        for edge in node.streaming:
            if edge.name not in values:
                continue
            stream = (edge.name, edge.to)
            producer = self._producer(stream)
            if producer.abandoned:
                continue
            array = await self._tensors.array(values[edge.name])
            if _is_filtered_out(edge, array):
                continue
            rank = self._placement.consumer_rank(stream)
            producer.add(await self._streams.item(f"{key}/{edge.name}.{edge.to}", array, rank))
            if len(self._placement.producer_ranks(stream)) > 1:
                await producer.wait_stored()  # the items of the next producer must follow these in the log

    def on_item(self, node: str) -> OnItem | None:
        """The function that takes a KV node's streamed tokens; None where they go into no stream.

        The streams of the walk that starts the sequence take its first token, those of the last walk all
        others.
        """
        over = [walk.nodes[node] for walk in self._placement.walks if node in walk.nodes]
        first, later = over[0].streaming, over[-1].streaming
        if all(edge.name != TOKEN for edge in (*first, *later)):
            return None
        sequence = f"{self._key}.{node}"

        def on_item(token: int, index: int) -> None:
            for edge in later if index else first:
                if edge.name == TOKEN and edge.accepts(token):
                    self._producer((edge.name, edge.to)).add_token(token, sequence)

        return on_item

    def on_tensors(self, node: str) -> OnTensors | None:
        """The function that takes the tensors of a KV node's sequence; None where they go into no stream."""
        edges = self._placement.tensor_streams(node)
        if not edges:
            return None
        sequence = f"{self._key}.{node}"

        def on_tensors(values: Mapping[str, Array]) -> None:
            for name, to in edges:
                if name in values:
                    self._producer((name, to)).add_tensors(values[name], sequence)

        return on_tensors

    def end(self, streams: Iterable[InputPort]) -> None:
        """End these streams: no item follows."""
        for stream in streams:
            self._producer(stream).end()

    async def wait_stored(self) -> None:
        """Wait until all items of this step are stored."""
        for producer in self._producers.values():
            await producer.wait_stored()

    def _producer(self, stream: InputPort) -> StreamProducer:
        assert self._streams is not None, "a model with streams has them"
        found = self._producers.get(stream)
        if found is None:
            rank = self._placement.consumer_rank(stream)
            found = self._producers[stream] = self._streams.producer(stream, rank)
        return found

    # ---- consuming ---------------------------------------------------------------------------------
    def begin(self, index: int, args: Mapping[str, Any]) -> None:
        """Note the arguments of a walk that begins, for the streams that it consumes here."""
        if self._streams is None:
            return
        for stream in self._consumed([self._placement.walks[index]]):
            self._streams.begin(stream, args)

    def totals(self) -> dict[str, StreamTotals]:
        """The totals of the streams that this rank's nodes of the step consume, by stream name."""
        if self._streams is None:
            return {}
        return {stream[0]: self._streams.totals(stream) for stream in self._consumed(self._placement.walks)}

    def walk_done(self, index: int) -> None:
        """Stop consuming the streams that no later walk of the step consumes, so that producers continue."""
        if self._streams is None:
            return
        walks = self._placement.walks
        later = self._consumed(walks[index + 1 :])
        for stream in self._consumed([walks[index]]):
            if stream not in later:
                self._streams.stop_consuming(stream, self._placement.producer_ranks(stream))

    def _consumed(self, walks: Sequence[CompiledWalk]) -> list[InputPort]:
        """The streams that this rank's nodes consume in these walks."""
        return [
            (name, node.name)
            for walk in walks
            for node in [walk.node_table[index] for index in walk.stream_consumers]
            if self._placement.rank_of(walk.name, node.name) == self._placement.rank
            for name in node.streams
        ]


def _is_filtered_out(edge: StreamingEdge, array: Array) -> bool:
    """True if the item is a single integer that the edge's range (`only`) excludes."""
    if edge.only is None or not array.dtype.startswith(("int", "uint")) or array.data.nbytes > 8:
        return False
    return not edge.accepts(int.from_bytes(array.data.tobytes(), "little", signed=array.dtype[0] == "i"))
