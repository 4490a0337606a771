"""Values that leave the walks of a step: for later walks, for the walks' results, and for the client.

It also frees the step's tensors: a tensor is released once no node on any rank can read it any more. Every
rank derives that from its own copy of the walks.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from models.base import TOKEN, EngineKind, ModelGraph
from shared.checkpoints import State, contents
from shared.events import WalkCall
from shared.tensors import Handle
from shared.walks import CompiledNode, CompiledWalk, Emission, Firing, ToClient
from shared.walks.compiled import Route
from workers.data_plane.port import Array
from workers.data_plane.step_tensors import StepTensors, Value, copied
from workers.execution import output_values
from workers.execution.output_tracks import OutputTracks
from workers.execution.step_placement import StepPlacement
from workers.execution.step_rate import StepRates

PROGRESS: Final = "progress"
"""The modality of advisory chunks whose metadata are a node's progress."""


class StepValues:
    """The values of one step outside of its walks."""

    def __init__(
        self, graph: ModelGraph, placement: StepPlacement, tensors: StepTensors, tracks: OutputTracks
    ) -> None:
        self._graph = graph
        self._placement = placement
        self._tensors = tensors
        self._tracks = tracks
        self._values: dict[str, Any] = {}  # by edge name, for later walks
        self._rates = StepRates()
        self._emitting: dict[int, Value] = {}  # by identity, while their bytes are copied

    def inputs(self, walk: CompiledWalk, call: WalkCall) -> dict[str, Any]:
        """The inputs of a walk: those of its call, and else the values of that name from earlier walks."""
        carried = {name: self._values[name] for name in walk.consumers if name in self._values}
        return carried | call.inputs

    def carry(self, emissions: Iterable[Emission]) -> None:
        """Keep values for later walks."""
        for emission in emissions:
            self._values[emission.edge] = emission.value

    async def emit(self, node: str, edge: str, to: ToClient, value: Any) -> None:
        """Emit a value of a node that is sent to the client.

        The tokens of a KV node are not emitted here: its sequence emits each one when it is sampled.
        """
        if self._graph.nodes[node] is EngineKind.KV and edge == TOKEN:
            return
        for tensor in value if isinstance(value, list) else [value]:
            await self._emit_tensor(node, edge, to.modality, tensor)

    async def _emit_tensor(self, node: str, edge: str, modality: str, value: Value) -> None:
        """Emit a tensor, unless an earlier attempt released a value that stands for it."""
        is_kept = self._tracks.keeps(node, modality)
        if is_kept and self._tracks.take_kept(node, modality) is not None:
            return
        self._emitting[id(value)] = value
        try:
            array = await self._tensors.array(value)
            data = await copied(array.data)
            if isinstance(value, Handle):
                self._tensors.check([value])
        finally:
            self._emitting.pop(id(value), None)
        media = self._graph.media.get(modality, {})
        output = self._tracks.of(node)
        for content in output_values.contents(f"{node}.{edge}", modality, array, data, media):
            if is_kept:
                output.add_content(content)
            else:
                self._tracks.release(node, content)
            await output.wait_for_room()

    def advise(self, node: str, progress: Mapping[str, Any], previews: Mapping[str, Array]) -> None:
        """Show progress and previews of a node to the client, if the log has room for them."""
        if progress:
            timed = self._rates.timed(node, progress, time.monotonic())
            metadata = {"node": node, "progress": timed}
            self._tracks.advise(node, {"modality": PROGRESS, "metadata": metadata})
        for modality, array in previews.items():
            media = self._graph.media.get(modality, {})
            for content in output_values.contents(node, modality, array, array.data.tobytes(), media):
                self._tracks.advise(node, content)

    def checkpoint(self, place: str, state: State) -> None:
        """Store the state of a run of a program, if the log has room for it."""
        for content in contents(place, state):
            self._tracks.store_checkpoint(content)

    # ---- values that an earlier attempt has released -----------------------------------------------
    async def as_released(
        self, node: CompiledNode, firing: Firing, args: Mapping[str, Any], outputs: Mapping[str, Value]
    ) -> dict[str, Value]:
        """A firing's outputs, in which the released values that stand replace the computed ones.

        So the walk continues with what the client has. A value that a loop holds is emitted at the loop's
        end, when the walk has used it already: it is not replaced.
        """
        given, number = dict(outputs), 0
        iteration = firing.path[-1] if firing.path else 0
        for route in node.routes:
            if not _is_emitted_now(route) or (route.when is not None and not route.when(iteration, args)):
                continue
            released = self._tracks.released_value(node.name, number)
            if released is None:
                break
            number += 1
            if route.keeps_released:
                array = output_values.array_of(released)
                given[route.edge] = await self._replaced(given[route.edge], array)
        return given

    async def _replaced(self, value: Value, array: Array) -> Value:
        """`array` in the form of `value`, which nothing reads."""
        if not isinstance(value, Handle):
            return array
        self._tensors.on_edges([value])
        return await self._tensors.put(f"{value.key}.released", array)

    async def keep(self, results: Mapping[str, Any]) -> dict[str, Handle]:
        """Keep a walk's results for the request; the values of a list are named `name.0`, `name.1`, ..."""
        kept: dict[str, Handle] = {}
        for name, value in results.items():
            if isinstance(value, list):
                kept |= {f"{name}.{index}": await self._tensors.keep(one) for index, one in enumerate(value)}
            else:
                kept[name] = await self._tensors.keep(value)
        return kept

    def close(self) -> None:
        """Forget all values."""
        self._values.clear()
        self._emitting.clear()

    def release_unused(self, walk_index: int, alive: Sequence[Any]) -> None:
        """Free the tensors that nothing reads any more; `alive` are the values that still have a reader."""
        if not self._tensors.holds:
            return
        later = [
            value
            for name, value in self._values.items()
            if any(name in walk.consumers for walk in self._placement.walks[walk_index + 1 :])
        ]
        flat = _flat([*alive, *later, *self._emitting.values()])
        self._tensors.keep_only({value.key for value in flat if isinstance(value, Handle)})


def _is_emitted_now(route: Route) -> bool:
    """True for a route to the client whose value no loop holds."""
    return isinstance(route.to, ToClient) and not route.holds


def _flat(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]
