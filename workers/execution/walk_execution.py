"""Execution of one walk of a step: the dataflow of its nodes on this rank.

    WalkExecution ──> WalkRun ──firing──> its node (`workers.execution.node_executor`)
                        ▲                    │
                        ├──complete──────────┴──> NodeFired to the other ranks of the step
                        ├──complete_remote── NodeFired of other ranks
                        └──feed───── the next chunk of a stream

Every rank of a step runs the whole walk and calls its own nodes (ADR 7); a step on a single rank sends
nothing to other ranks.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from models.base import ChunkOf
from shared.errors import BugError
from shared.events import EdgeEvent, NodeFired, WalkResult
from shared.tensors import Handle
from shared.walks import NOT_DUE, CompiledNode, Emission, Firing, InputPort, StreamChunk, ToClient, WalkRun
from workers.data_plane.port import INLINE_BYTES
from workers.data_plane.step_tensors import StepTensors, Value
from workers.execution.kv_nodes import KvNodes
from workers.execution.loop_checkpoints import LoopCheckpoints
from workers.execution.node_executor import NodeExecutor
from workers.execution.node_result import NodeResult
from workers.execution.output_tracks import OutputTracks
from workers.execution.step_placement import PROMPT, StepPlacement
from workers.execution.step_streams import StepStreams
from workers.execution.step_values import StepValues
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams

T = TypeVar("T")
Work: TypeAlias = Callable[[T], Coroutine[Any, Any, None]]
"""Work that a walk does in a task: on a firing, on emissions, or on a stream."""
Send: TypeAlias = Callable[[int, EdgeEvent], Coroutine[Any, Any, None]]
"""Sends an event to a rank, as soon as the log accepts it."""
PeerFiring: TypeAlias = tuple[NodeFired, int]
"""A node call on another rank, and that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of a step that its walks share; `streams` is None where the model has none."""

    key: StepKey
    placement: StepPlacement
    nodes: NodeExecutor
    kv_nodes: KvNodes
    tensors: StepTensors
    values: StepValues
    loops: LoopCheckpoints
    step_streams: StepStreams
    tracks: OutputTracks
    streams: AttemptStreams | None
    send: Send


class WalkExecution:
    """One walk under way: number `index` of its step.

    `pending` are the firings of other ranks that are not due yet, first those that arrived before it started.
    """

    def __init__(
        self,
        step: StepParts,
        index: int,
        args: Mapping[str, Any],
        inputs: dict[str, Any],
        pending: list[PeerFiring],
    ) -> None:
        self.index = index
        self.pending = pending
        self._args = args
        self._step = step
        self._placement = placement = step.placement
        self._walk = placement.walks[index]
        # A step on a single rank needs no list of its nodes: all of them run here.
        self._run = WalkRun(
            self._walk, args, placement.local_nodes(self._walk) if placement.peer_ranks else None
        )
        self._run.start(inputs)
        if placement.peer_ranks:
            self._note_prompts(inputs)
        # Only events from outside can wake a walk without own tasks: firings of peers, items of streams.
        waits = bool(placement.peer_ranks or self._walk.stream_consumers)
        self._over = asyncio.get_running_loop().create_future() if waits else None
        self._tasks: asyncio.TaskGroup
        self._feeding: set[InputPort] = set()  # streams whose next chunk is being assembled
        self._chunks: dict[InputPort, StreamChunk] = {}  # assembled, and not taken by a firing yet
        self._facts: dict[str, Any] = {}
        self._results: dict[str, Any] = {}  # values of this rank's nodes for the walk's result
        self._emission_order = asyncio.Lock()

    async def run(self) -> WalkResult:
        """Run the walk to its end.

        Raises:
            DalSegnoError: a node, an engine, a tensor or a stream failed.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._advance()
                if self._over is not None:
                    await self._over
        except ExceptionGroup as group:
            raise _first(group) from None
        if not self._run.done:
            raise BugError(f"walk {self._walk.name!r}: expected it to run to its end, found no node to call")
        outputs = await self._step.values.keep(self._results)
        return WalkResult(name=self._walk.name, facts=self._facts, outputs=outputs)

    def receive(self, firing: PeerFiring) -> None:
        """Take a firing of another rank."""
        self.pending.append(firing)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Fail the walk, unless it is over."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    # ---- progress ----------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Start everything that can be done now."""
        if self.pending:
            self._apply_due()
        while firings := self._run.take_ready():
            for firing in firings:
                self._start(self._fire, firing)
            if not self.pending or not self._apply_due():
                break
        if self._walk.stream_consumers:
            self._feed_waiting_nodes()
        if self._over is not None and self._run.done and not self._over.done():
            self._over.set_result(None)

    def _wake(self) -> None:
        """Advance after an event from outside; an error fails the walk, not the caller."""
        if self._over is None or self._over.done():
            return
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - the walk raises it
            self._over.set_exception(error)

    def _start(self, work: Work[T], argument: T) -> None:
        self._tasks.create_task(self._task(work, argument))

    async def _task(self, work: Work[T], argument: T) -> None:
        await work(argument)  # called here, so that a task dropped before its start leaves no coroutine
        self._advance()

    # ---- node calls on this rank -------------------------------------------------------------------
    async def _fire(self, firing: Firing) -> None:
        step, node, key = self._step, self._walk.nodes[firing.node], self._tensor_key(firing)
        result = await step.nodes.fire(self.index, firing, key, self._chunk_taken(node))
        self._facts |= result.facts
        step.values.advise(firing.node, result.progress, result.previews)
        await step.loops.store(self.index, firing, result.outputs, result.stops)
        if result.streamed:
            await step.step_streams.send(node, result.streamed, key)
        if step.tracks.has_kept(firing.node):
            async with self._emission_order:  # the released values are taken in the order of completion
                result.outputs = await step.values.as_released(node, firing, self._args, result.outputs)
                emissions = self._complete(firing, result)
                await self._send_to_peers(firing, result, key)
                await self._emit(emissions)
        elif emissions := self._complete(firing, result):
            async with self._emission_order:  # entered in the order of completion, equal in every attempt
                await self._send_to_peers(firing, result, key)
                await self._emit(emissions)
        else:
            await self._send_to_peers(firing, result, key)
        self._release_unused()

    def _complete(self, firing: Firing, result: NodeResult) -> list[Emission]:
        """Pass a result's values on in the walk; return those that leave it."""
        emissions = self._run.complete(firing, result.outputs, result.stops)
        assert emissions is not None, "a firing under way is completed once"
        on_edges = [value for value in result.outputs.values() if isinstance(value, Handle)]
        self._step.tensors.on_edges(on_edges)
        return emissions

    def _tensor_key(self, firing: Firing) -> str:
        """The prefix of the keys of a firing's tensors: request / attempt / step / walk / node / path.

        A repeated walk of a step appends its index to its name, so that no two tensors share a key.
        """
        name = self._walk.name
        if any(walk.name == name for walk in self._placement.walks[: self.index]):
            name = f"{name}@{self.index}"
        return "/".join(map(str, (*self._step.key, name, firing.node, *firing.path)))

    def _chunk_taken(self, node: CompiledNode) -> ChunkOf | None:
        """The chunk that a firing takes; with several streaming inputs, the chunk of the first."""
        chunks = [self._chunks.pop((stream, node.name)) for stream in node.streams]
        if not chunks:
            return None
        return ChunkOf(number=chunks[0].number, fresh=chunks[0].fresh, last=chunks[0].last)

    # ---- values that leave the walk ----------------------------------------------------------------
    async def _emit_in_order(self, emissions: Sequence[Emission]) -> None:
        async with self._emission_order:
            await self._emit(emissions)

    async def _emit(self, emissions: Sequence[Emission]) -> None:
        values = self._step.values
        for emission in emissions:
            values.carry([emission])
            if not self._is_local(emission.node):
                continue
            if isinstance(emission.to, ToClient):
                await values.emit(emission.node, emission.edge, emission.to, emission.value)
            else:
                self._results[emission.edge] = emission.value

    def _is_local(self, node: str) -> bool:
        if not self._placement.peer_ranks:
            return True
        return self._placement.rank_of(self._walk.name, node) == self._placement.rank

    def _release_unused(self) -> None:
        alive = [*self._run.live_values(), *self._step.kv_nodes.prompts.values()]
        self._step.values.release_unused(self.index, alive)

    # ---- node calls on other ranks -----------------------------------------------------------------
    async def _send_to_peers(self, firing: Firing, result: NodeResult, key: str) -> None:
        if not self._placement.peer_ranks:
            return
        step_key = self._step.key
        self._note_prompts(result.outputs, self._walk.nodes[firing.node])
        outputs = {name: _as_reference(f"{key}/{name}", value) for name, value in result.outputs.items()}
        path = ".".join(map(str, (self.index, firing.node, *firing.path)))
        for rank in self._placement.peer_ranks:
            event = NodeFired(
                id=f"{step_key.request_id}.fired.{step_key.attempt}.{step_key.step}.{path}.{rank}",
                index=step_key.step,
                walk=self.index,
                node=firing.node,
                path=firing.path,
                outputs=outputs,
                stops=[*result.stops, *firing.ends],
                row=result.handover if rank == result.next_rank else None,
            )
            await self._step.send(rank, event)

    def _apply_due(self) -> bool:
        """Apply the pending firings of other ranks that are due; return True if there were any."""
        applied = False
        changed = bool(self.pending)
        while changed:
            changed = False
            firings, self.pending = self.pending, []
            for firing in firings:
                if self._apply(firing):
                    changed = applied = True
        if applied:
            self._release_unused()
        return applied

    def _apply(self, firing: PeerFiring) -> bool:
        """Complete a firing of another rank; return False for a duplicate, or for one that is not due."""
        event, rank = firing
        node = self._walk.nodes.get(event.node)
        if node is not None and self._placement.rank_of(self._walk.name, event.node) != rank:
            raise BugError(
                f"walk {self._walk.name!r}: rank {rank} reports a call of node {event.node!r}; expected it "
                f"from rank {self._placement.rank_of(self._walk.name, event.node)}, where the node is placed"
            )
        emissions = self._run.complete_remote(event.node, event.path, event.outputs, event.stops)
        if emissions is NOT_DUE:
            self.pending.append(firing)
            return False
        if emissions is None:
            return False
        assert node is not None, "the run accepted a firing of this node"
        if event.row is not None:
            self._step.kv_nodes.receive_handover(event.node, rank, event.row)
        self._note_prompts(event.outputs, node)
        self._step.values.carry(emissions)
        if local := [emission for emission in emissions if self._is_local(emission.node)]:
            self._start(self._emit_in_order, local)
        return True

    def _note_prompts(self, values: Mapping[str, Any], source: CompiledNode | None = None) -> None:
        """Note the prompts of sequences that move between ranks: the rank that continues needs them, too."""
        if PROMPT not in values:
            return
        consumers = (
            self._walk.consumers.get(PROMPT, ())
            if source is None
            else [route.to for route in source.routes if route.edge == PROMPT and isinstance(route.to, str)]
        )
        for node in consumers:
            if self._placement.is_handed_over(node) and self._placement.first_index(node) == self.index:
                self._step.kv_nodes.prompts[node] = values[PROMPT]

    # ---- streams -----------------------------------------------------------------------------------
    def _feed_waiting_nodes(self) -> None:
        streams = self._step.streams
        assert streams is not None, "a model with streams has them"
        for stream in self._run.awaited_streams():
            if stream in self._feeding:
                continue
            if streams.ready(stream):
                self._feeding.add(stream)
                self._start(self._feed, stream)
            else:
                streams.watch(stream, self._wake)

    async def _feed(self, stream: InputPort) -> None:
        assert self._step.streams is not None
        chunk, array = await self._step.streams.next_chunk(stream)
        self._feeding.discard(stream)
        self._chunks[stream] = chunk
        fed = self._run.feed(*stream, array, last=chunk.last)
        assert fed, "a waiting node takes its chunk"


def _as_reference(key: str, value: Value) -> Handle:
    """A value as sent to other ranks, which read only handles and small tensors; of others, the key."""
    if isinstance(value, Handle) and (value.data is None or len(value.data) <= INLINE_BYTES):
        return value
    return Handle(key=key, dtype=value.dtype, shape=value.shape)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group; the others followed from it, or occurred concurrently."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
