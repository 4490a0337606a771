"""This rank's nodes in one step: a firing goes to its node's engine, and comes back as an outcome.

    CPU node         a thread of the pool                    values in their handles
    stateless node   the stateless engine                    arrays
    KV node          a row of the engine (`sequences`)       token ids

A node that streams on fires when there is room for what it makes. What it puts out becomes a handle where
the walk's result, or another rank, needs one; what never leaves this rank may be an array: nobody copies it.

Of a walk it knows the place in its step, and nothing of how far it is.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor as Pool
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from models.base import ChunkOf, EngineKind, ModelGraph, Processing
from shared.errors import BugError
from shared.events import NodeReady
from shared.tensors import Handle
from shared.walks import Client, CompiledNode, Firing
from workers.data_plane.port import INLINE_BYTES, Array, TensorStore
from workers.data_plane.step_tensors import StepTensors, Value, as_array, as_inline
from workers.execution.kv_steps import KvNodes
from workers.execution.node_result import NodeResult
from workers.execution.step_placement import GraphOutputs, StepPlacement
from workers.execution.step_streams import StepStreams
from workers.generation.engine_client import EngineClient
from workers.stateless_engine.firing import FiringResult


class StatelessPort(Protocol):
    """What a step asks of the stateless engine (`workers.stateless_engine.thread.StatelessThread`)."""

    async def fire(
        self,
        node: str,
        inputs: Mapping[str, Array],
        args: Mapping[str, Any],
        *,
        seed: int,
        path: tuple[int, ...],
        chunk: ChunkOf | None,
    ) -> FiringResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """What this rank runs, loaded."""

    graph: ModelGraph
    processing: Processing
    rows: EngineClient
    pool: Pool
    store: TensorStore
    stateless: StatelessPort | None = None
    script: GraphOutputs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "script", GraphOutputs(self.graph))


class NodeExecutor:
    """The nodes of one step that this rank fires."""

    def __init__(
        self,
        hosted: HostedModel,
        ready: NodeReady,
        placed: StepPlacement,
        *,
        tensors: StepTensors,
        sequences: KvNodes,
        streams: StepStreams,
    ) -> None:
        self._hosted = hosted
        self._ready = ready
        self._placed = placed
        self._tensors = tensors
        self._sequences = sequences
        self._streams = streams

    async def fire(self, place: int, firing: Firing, key: str, chunk: ChunkOf | None) -> NodeResult:
        """Fire a node of the walk at `place`; `key` begins the keys of what it puts out.

        Raises:
            DalSegnoError: the node, or its engine, failed; or a tensor is gone.
        """
        node = self._placed.walks[place].nodes[firing.node]
        match self._hosted.graph.nodes[firing.node]:
            case EngineKind.CPU:
                return await self._on_cpu(place, node, firing, key)
            case EngineKind.KV:
                return await self._on_row(place, firing, key)
            case EngineKind.STATELESS:
                return await self._on_stateless(place, node, firing, key, chunk)

    # ---- engines -----------------------------------------------------------------------------------
    async def _on_cpu(self, place: int, node: CompiledNode, firing: Firing, key: str) -> NodeResult:
        if node.streaming:
            await self._streams.have_room(node)
        inputs = {name: await self._inline(name, value) for name, value in firing.inputs.items()}
        args = self._ready.walks[place].args
        work = partial(self._hosted.processing.run, firing.node, key, inputs, args)
        result = await asyncio.get_running_loop().run_in_executor(self._hosted.pool, work)
        outputs: dict[str, Value] = {
            name: handle for name, handle in result.outputs.items() if name not in node.streamed
        }
        if self._placed.others:
            for name, handle in result.outputs.items():
                if name in outputs and self._is_read_elsewhere(place, node, name):
                    outputs[name] = await self._moved(handle)
        return NodeResult(outputs=outputs, streamed=_items(node, result.outputs), facts=result.facts)

    async def _on_stateless(
        self, place: int, node: CompiledNode, firing: Firing, key: str, chunk: ChunkOf | None
    ) -> NodeResult:
        engine = self._hosted.stateless
        if engine is None:
            raise BugError(f"node {firing.node!r} needs the stateless engine, which this rank has not")
        if node.streaming:
            await self._streams.have_room(node)
        handles = [value for value in firing.inputs.values() if isinstance(value, Handle)]
        inputs = {name: await self._tensors.array(value) for name, value in firing.inputs.items()}
        args = self._ready.walks[place].args
        fired = await engine.fire(
            firing.node, inputs, args, seed=self._ready.seed, path=firing.path, chunk=chunk
        )
        self._tensors.check(handles)
        outputs = {
            name: await self._value(place, node, name, f"{key}/{name}", array)
            for name, array in fired.outputs.items()
            if name not in node.streamed
        }
        items = _items(node, fired.outputs)
        return NodeResult(outputs=outputs, streamed=items, facts=fired.facts, stops=fired.stops)

    async def _on_row(self, place: int, firing: Firing, key: str) -> NodeResult:
        if any(isinstance(value, Array) for value in firing.inputs.values()):
            inputs = {name: await self._inline(name, value) for name, value in firing.inputs.items()}
            firing = Firing(firing.node, inputs, firing.path)
        return await self._sequences.fire(place, firing, key)

    # ---- values ------------------------------------------------------------------------------------
    async def _inline(self, name: str, value: Value) -> Handle:
        if isinstance(value, Array):
            return await as_inline(name, value)
        return await self._tensors.inline(value)

    async def _value(self, place: int, node: CompiledNode, name: str, key: str, array: Array) -> Value:
        """What goes on an edge: the array itself, unless the walk's result or another rank needs a handle."""
        routes = [route for route in node.routes if route.edge == name]
        if all(isinstance(route.to, str | Client) for route in routes) and not (
            self._placed.others and self._is_read_elsewhere(place, node, name)
        ):
            return array
        return await self._tensors.put(key, array)

    def _is_read_elsewhere(self, place: int, node: CompiledNode, name: str) -> bool:
        return any(
            self._placed.is_read_elsewhere(place, route) for route in node.routes if route.edge == name
        )

    async def _moved(self, handle: Handle) -> Handle:
        """A CPU node's output for another rank: from its event into the store, where it is not small."""
        if handle.data is None or len(handle.data) <= INLINE_BYTES:
            return handle
        return await self._tensors.put(handle.key, as_array(handle))


def _items(node: CompiledNode, outputs: Mapping[str, Value]) -> dict[str, Value]:
    """What of a node's outputs streams into other walks."""
    streamed = {edge.name for edge in node.streaming}
    return {name: value for name, value in outputs.items() if name in streamed}
