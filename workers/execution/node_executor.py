"""Calls of this rank's nodes in one step: each firing goes to the engine of its node and returns a result.

    CPU node         a thread of the pool                        handles with inline data, and arrays
    stateless node   the stateless engine                        arrays
    KV node          a sequence of the KV engine (`kv_nodes`)    token ids
                     a run of a program (`program_runs`)         arrays

A node that produces a stream is called once the stream has room. An output becomes a handle where the walk's
result or another rank needs one; an output used on this rank alone stays an array, without a copy.

The module knows a walk's index in its step, but not the progress of the walk.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from models.base import ChunkOf, CpuResult, EngineKind, ModelGraph, Processing
from models.media.kinds import MediaError
from shared.errors import BugError
from shared.events import Media, NodeReady
from shared.tensors import ITEM_BYTES, Handle
from shared.walks import CompiledNode, Firing, ToClient
from workers.data_plane.port import INLINE_BYTES, Array, DeviceArray, PublishOnDevice, TensorStore
from workers.data_plane.step_tensors import StepTensors, Value, as_array, as_inline
from workers.execution.kv_nodes import EMBEDS, KvNodes
from workers.execution.node_result import NodeResult
from workers.execution.node_works import NodeWorks
from workers.execution.program_runs import ProgramRuns
from workers.execution.run_checkpoints import RunCheckpoints
from workers.execution.step_placement import GraphOutputs, StepPlacement
from workers.execution.step_streams import StepStreams
from workers.generation.engine_client import EngineClient
from workers.guides.guide_queue import GuideQueue
from workers.machine.cpu_pool import CpuPool, is_large
from workers.stateless_engine.firing import FiringReport, FiringResult
from workers.threads.engine_work import EngineWork

if TYPE_CHECKING:
    import numpy.typing as npt


class StatelessPort(Protocol):
    """The stateless engine as a step uses it (`workers.stateless_engine.thread.StatelessThread`)."""

    async def fire(
        self,
        node: str,
        inputs: Mapping[str, Array | DeviceArray],
        args: Mapping[str, Any],
        *,
        seed: int,
        path: tuple[int, ...],
        chunk: ChunkOf | None,
        publish: Mapping[str, PublishOnDevice],
        state: Mapping[str, Array],
        report: Callable[[FiringReport], None],
        work: EngineWork,
    ) -> FiringResult: ...


class MediaCopies(Protocol):
    """The local copies of media (`workers.media.fetch.LocalMedia`)."""

    def held(self, media: Sequence[Media], tenant: str | None) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """The loaded model of this rank, with its engines.

    Attributes:
        engine: the client of the KV engine.
        pool: the threads of CPU nodes.
        guides: the queue in which clients' guides are checked and compiled.
        stateless: the stateless engine; None where no node of this rank needs it.
        copies: the local copies of media; None where no node of this rank reads any.
        outputs: the output nodes of the graph.
    """

    graph: ModelGraph
    processing: Processing
    engine: EngineClient
    pool: CpuPool
    store: TensorStore
    stateless: StatelessPort | None = None
    copies: MediaCopies | None = None
    guides: GuideQueue = field(init=False)
    outputs: GraphOutputs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "guides", GuideQueue(self.processing))
        object.__setattr__(self, "outputs", GraphOutputs(self.graph))


class NodeExecutor:
    """Calls the nodes of one step that this rank runs."""

    def __init__(
        self,
        hosted: HostedModel,
        ready: NodeReady,
        placement: StepPlacement,
        *,
        tensors: StepTensors,
        kv_nodes: KvNodes,
        programs: ProgramRuns,
        streams: StepStreams,
        checkpoints: RunCheckpoints,
        advise: Callable[[str, Mapping[str, Any], Mapping[str, Array]], None],
        works: NodeWorks,
    ) -> None:
        self._hosted = hosted
        self._ready = ready
        self._placement = placement
        self._tensors = tensors
        self._kv_nodes = kv_nodes
        self._programs = programs
        self._streams = streams
        self._checkpoints = checkpoints
        self._advise = advise
        self._works = works

    async def fire(self, walk_index: int, firing: Firing, key: str, chunk: ChunkOf | None) -> NodeResult:
        """Call a node of the walk at `walk_index`; `key` is the key prefix of its outputs.

        Raises:
            DalSegnoError: the node or its engine failed, or a tensor is gone.
        """
        with self._works.call(firing.node):
            return await self._called(walk_index, firing, key, chunk)

    async def _called(self, walk_index: int, firing: Firing, key: str, chunk: ChunkOf | None) -> NodeResult:
        node = self._placement.walks[walk_index].nodes[firing.node]
        match self._hosted.graph.nodes[firing.node]:
            case EngineKind.CPU:
                return await self._on_cpu(walk_index, node, firing, key)
            case EngineKind.KV if self._programs.is_asked(walk_index):
                return await self._on_program(walk_index, node, firing, key)
            case EngineKind.KV:
                return await self._on_kv(walk_index, node, firing, key)
            case EngineKind.STATELESS:
                return await self._on_stateless(walk_index, node, firing, key, chunk)

    # ---- engines -----------------------------------------------------------------------------------
    async def _on_cpu(self, walk_index: int, node: CompiledNode, firing: Firing, key: str) -> NodeResult:
        if node.streaming:
            await self._streams.wait_for_room(node)
        inputs = {name: await self._inline(name, value) for name, value in firing.inputs.items()}
        args = self._ready.walks[walk_index].args
        tenant = self._ready.tenant
        async with self._held_media(args) as has_media:
            large = has_media or is_large(args)
            with self._works.record_of_call(firing.node) as record:

                def work() -> CpuResult:
                    record.admit()
                    return self._hosted.processing.run(firing.node, key, inputs, args)

                record.queue()
                result = await self._hosted.pool.run(work, tenant=tenant, is_large=large)
        if result.guide is not None:
            await self._hosted.guides.check(result.guide, tenant)
        values = {name: _cpu_value(f"{key}/{name}", value) for name, value in result.outputs.items()}
        outputs: dict[str, Value] = {
            name: await self._cpu_output(walk_index, node, name, key, value)
            for name, value in values.items()
            if name not in node.streamed
        }
        return NodeResult(
            outputs=outputs,
            streamed=_items(node, values),
            facts=result.facts,
            progress=result.progress,
            previews={name: _as_array(_cpu_value(name, value)) for name, value in result.previews.items()},
        )

    @asynccontextmanager
    async def _held_media(self, args: Mapping[str, Any]) -> AsyncGenerator[bool, None]:
        """Hold local copies of the request's media while a node reads them: its thread does not wait.

        Yields true if there are any: reading them takes long, so they are large inputs.
        """
        media = msgspec.convert(args.get("inputs", {}).get("files", []), list[Media])
        try:
            async with AsyncExitStack() as held:
                if media and self._hosted.copies is not None:
                    await held.enter_async_context(
                        self._hosted.copies.held(media, self._ready.tenant or None)
                    )
                yield bool(media)
        except MediaError as error:
            raise error.named(media) from error

    async def _cpu_output(
        self, walk_index: int, node: CompiledNode, name: str, key: str, value: Value
    ) -> Value:
        """The value for an edge: inline data stay in their handle, unless another rank needs many of them."""
        if isinstance(value, Array):
            return await self._value(walk_index, node, name, f"{key}/{name}", value)
        if self._placement.peer_ranks and self._is_read_by_peers(walk_index, node, name):
            return await self._shared(value)
        return value

    async def _on_stateless(
        self, walk_index: int, node: CompiledNode, firing: Firing, key: str, chunk: ChunkOf | None
    ) -> NodeResult:
        engine = self._hosted.stateless
        if engine is None:
            raise BugError(f"node {firing.node!r}: expected a stateless engine on this rank, found none")
        if node.streaming:
            await self._streams.wait_for_room(node)
        handles = [value for value in firing.inputs.values() if isinstance(value, Handle)]
        inputs = {name: await self._tensors.for_engine(value) for name, value in firing.inputs.items()}
        args = self._ready.walks[walk_index].args
        with self._works.record_of_call(firing.node) as work:
            fired = await engine.fire(
                firing.node,
                inputs,
                args,
                seed=self._ready.seed,
                path=firing.path,
                chunk=chunk,
                publish=self._publishers(walk_index, node, key),
                state=self._checkpoints.state(walk_index, firing),
                report=partial(self._take_report, walk_index, firing),
                work=work,
            )
        self._tensors.check(handles)
        outputs = {
            name: await self._value(walk_index, node, name, f"{key}/{name}", array)
            for name, array in fired.outputs.items()
            if name not in node.streamed
        }
        items = _items(node, fired.outputs)
        return NodeResult(
            outputs=outputs,
            streamed=items,
            facts=fired.facts,
            stops=fired.stops,
            progress=fired.progress,
            previews=fired.previews,
        )

    def _take_report(self, walk_index: int, firing: Firing, report: FiringReport) -> None:
        """Show the progress of a stepped run, and store its checkpoint."""
        self._advise(firing.node, report.progress, report.previews)
        if report.state:
            self._checkpoints.store(walk_index, firing, report.state)

    async def _on_kv(self, walk_index: int, node: CompiledNode, firing: Firing, key: str) -> NodeResult:
        if any(isinstance(value, Array) for value in firing.inputs.values()):
            inputs = {
                name: value if name == EMBEDS or name in node.streams else await self._inline(name, value)
                for name, value in firing.inputs.items()
            }
            firing = Firing(firing.node, inputs, firing.path)
        return await self._kv_nodes.fire(walk_index, firing, key)

    async def _on_program(self, walk_index: int, node: CompiledNode, firing: Firing, key: str) -> NodeResult:
        handles = [value for value in firing.inputs.values() if isinstance(value, Handle)]
        inputs = {name: await self._tensors.for_engine(value) for name, value in firing.inputs.items()}
        made = await self._programs.run(walk_index, firing, inputs)
        self._tensors.check(handles)
        outputs = {
            name: await self._value(walk_index, node, name, f"{key}/{name}", array)
            for name, array in made.outputs.items()
            if name in node.outputs
        }
        return NodeResult(outputs=outputs, facts=made.facts)

    # ---- values ------------------------------------------------------------------------------------
    async def _inline(self, name: str, value: Value) -> Handle:
        if isinstance(value, Array):
            return await as_inline(name, value)
        return await self._tensors.inline(value)

    def _publishers(self, walk_index: int, node: CompiledNode, key: str) -> dict[str, PublishOnDevice]:
        """By edge, publishes an output from GPU memory: where only other ranks read it in this step."""
        readers = self._placement.peer_ranks
        if not readers or self._hosted.store.device is None:
            return {}
        edges = {
            route.edge for route in node.routes if self._placement.is_read_by_peers(walk_index, route)
        }.difference(node.streamed)
        found = {edge: self._tensors.publisher(f"{key}/{edge}", readers) for edge in edges}
        return {edge: publish for edge, publish in found.items() if publish is not None}

    async def _value(
        self, walk_index: int, node: CompiledNode, name: str, key: str, array: Array | Handle
    ) -> Value:
        """The value for an edge: the array, unless the walk's result or another rank needs a handle."""
        if isinstance(array, Handle):
            return self._tensors.note_put(array)
        routes = [route for route in node.routes if route.edge == name]
        if all(isinstance(route.to, str | ToClient) for route in routes) and not (
            self._placement.peer_ranks and self._is_read_by_peers(walk_index, node, name)
        ):
            return array
        return await self._tensors.put(key, array)

    def _is_read_by_peers(self, walk_index: int, node: CompiledNode, name: str) -> bool:
        return any(
            self._placement.is_read_by_peers(walk_index, route) for route in node.routes if route.edge == name
        )

    async def _shared(self, handle: Handle) -> Handle:
        """A CPU node's output for another rank: in the store unless it is small enough for an event."""
        if handle.data is None or len(handle.data) <= INLINE_BYTES:
            return handle
        return await self._tensors.put(handle.key, as_array(handle))


def _as_array(value: Value) -> Array:
    return value if isinstance(value, Array) else as_array(value)


def _cpu_value(key: str, value: "Handle | npt.NDArray[Any]") -> Value:
    """An output of a CPU node; an array of a few bytes becomes a handle with inline data.

    Raises:
        BugError: tensors have no such dtype.
    """
    if isinstance(value, Handle):
        return value
    array = np.ascontiguousarray(value).reshape(value.shape)  # reshape: a scalar has become (1,)
    if array.dtype.name not in ITEM_BYTES or array.dtype.byteorder == ">":
        raise BugError(f"{key}: expected an array of one of {sorted(ITEM_BYTES)}, found {array.dtype!r}")
    if array.nbytes <= INLINE_BYTES:
        return Handle(key=key, dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
    return Array(dtype=array.dtype.name, shape=array.shape, data=array.reshape(-1).view(np.uint8))


def _items(node: CompiledNode, outputs: Mapping[str, Value]) -> dict[str, Value]:
    """The outputs of a node that go into streams."""
    streamed = {edge.name for edge in node.streaming}
    return {name: value for name, value in outputs.items() if name in streamed}
