"""A step's side of the streams: which of its nodes' values become items, and how many came in.

    a row's tokens            ──> one item each, as they are sampled     (`on_item`)
    another node's firing     ──> one item of each of its streams        (`send`)

The streams themselves outlive the step and are the attempt's (`workers.streams.attempt_streams`).
"""

from collections.abc import Iterable, Mapping, Sequence

from shared.events import StreamTotals
from shared.walks import CompiledNode, CompiledWalk, InputPort, StreamingEdge
from workers.data_plane.port import Array
from workers.data_plane.step_tensors import StepTensors, Value
from workers.execution.kv_steps import OnItem
from workers.execution.step_placement import StepPlacement
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams
from workers.streams.producer import StreamProducer


class StepStreams:
    """What one step makes and takes of streams; `streams` is None where the model has none."""

    def __init__(self, streams: AttemptStreams | None, key: StepKey, placed: StepPlacement, tensors: StepTensors) -> None:
        self._streams = streams
        self._key = key
        self._placed = placed
        self._tensors = tensors
        self._outlets: dict[InputPort, StreamProducer] = {}

    # ---- making ------------------------------------------------------------------------------------
    async def have_room(self, node: CompiledNode) -> None:
        """Wait until a node may make an item of each of its streams."""
        for edge in node.streaming:
            await self._outlet((edge.name, edge.to)).room()

    async def send(self, node: CompiledNode, values: Mapping[str, Value], key: str) -> None:
        """Send what a firing came to as one item of each of its streams; `key` begins its tensors' keys."""
        assert self._streams is not None, "a model with streams has them"
        for edge in node.streaming:
            if edge.name not in values:
                continue
            stream = (edge.name, edge.to)
            outlet = self._outlet(stream)
            if outlet.left:
                continue
            array = await self._tensors.array(values[edge.name])
            if _is_left_out(edge, array):
                continue
            taker = self._placed.taker(stream)
            outlet.add(await self._streams.item(f"{key}/{edge.name}.{edge.to}", array, taker))
            if len(self._placed.feeders(stream)) > 1:
                await outlet.stored()  # the other feeder's items stand behind these in the log

    def on_item(self, node: str) -> OnItem | None:
        """Where a row's tokens stream on: the first by the walk that begins it, the others by the last."""
        over = [walk.nodes[node] for walk in self._placed.walks if node in walk.nodes]
        first, later = over[0].streaming, over[-1].streaming
        if not first and not later:
            return None
        row = f"{self._key}.{node}"

        def on_item(token: int, place: int) -> None:
            for edge in later if place else first:
                if edge.takes(token):
                    self._outlet((edge.name, edge.to)).add_token(token, row)

        return on_item

    def end(self, streams: Iterable[InputPort]) -> None:
        """Of these no item follows."""
        for stream in streams:
            self._outlet(stream).end()

    async def stored(self) -> None:
        """Wait until all that was streamed on is stored."""
        for outlet in self._outlets.values():
            await outlet.stored()

    def _outlet(self, stream: InputPort) -> StreamProducer:
        assert self._streams is not None, "a model with streams has them"
        found = self._outlets.get(stream)
        if found is None:
            found = self._outlets[stream] = self._streams.outlet(stream, self._placed.taker(stream))
        return found

    # ---- taking ------------------------------------------------------------------------------------
    def taken(self) -> dict[str, StreamTotals]:
        """What came in on the streams that this rank's nodes of the step take."""
        if self._streams is None:
            return {}
        return {stream[0]: self._streams.totals(stream) for stream in self._taken_by(self._placed.walks)}

    def leave(self, place: int) -> None:
        """A walk is done: whoever feeds what no later one takes is held for it no more."""
        if self._streams is None:
            return
        walks = self._placed.walks
        later = self._taken_by(walks[place + 1 :])
        for stream in self._taken_by([walks[place]]):
            if stream not in later:
                self._streams.leave(stream, self._placed.feeders(stream))

    def _taken_by(self, walks: Sequence[CompiledWalk]) -> list[InputPort]:
        """The streams that this rank's nodes take in these walks."""
        return [
            (name, node.name)
            for walk in walks
            for node in [walk.node_table[index] for index in walk.takers_of_streams]
            if self._placed.rank_of(walk.name, node.name) == self._placed.rank
            for name in node.streams
        ]


def _is_left_out(edge: StreamingEdge, array: Array) -> bool:
    """Whether an item is a number that the edge leaves out."""
    if edge.only is None or not array.dtype.startswith(("int", "uint")) or array.data.nbytes > 8:
        return False
    return not edge.takes(int.from_bytes(array.data.tobytes(), "little", signed=array.dtype[0] == "i"))
