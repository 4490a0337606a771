"""Values that leave the walks of a step: for later walks, for the walks' results, and for the client.

It also frees the step's tensors: a tensor is released once no node on any rank can read it any more. Every
rank derives that from its own copy of the walks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from models.base import EngineKind, ModelGraph
from shared.events import WalkCall
from shared.tensors import Handle
from shared.walks import CompiledWalk, Emission, ToClient
from workers.data_plane.step_tensors import StepTensors, Value, copied
from workers.execution.output_tracks import OutputTracks
from workers.execution.step_placement import StepPlacement


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
        self._emitting: dict[int, Value] = {}  # by identity, while their bytes are copied

    def inputs(self, walk: CompiledWalk, call: WalkCall) -> dict[str, Any]:
        """The inputs of a walk: those of its call, and else the values of that name from earlier walks."""
        carried = {name: self._values[name] for name in walk.consumers if name in self._values}
        return carried | call.inputs

    def carry(self, emissions: Iterable[Emission]) -> None:
        """Keep values for later walks."""
        for emission in emissions:
            self._values[emission.edge] = emission.value

    async def emit(self, node: str, to: ToClient, value: Any) -> None:
        """Emit a value of a node that is sent to the client.

        Tokens of a KV node are not emitted here: its sequence emits each of them when it is sampled.
        """
        if self._graph.nodes[node] is EngineKind.KV:
            return
        for tensor in value if isinstance(value, list) else [value]:
            await self._emit_tensor(node, to.modality, tensor)

    async def _emit_tensor(self, node: str, modality: str, value: Value) -> None:
        """Emit a tensor: text as text, any other modality as bytes with dtype and shape."""
        self._emitting[id(value)] = value
        try:
            array = await self._tensors.array(value)
            data = await copied(array.data)
            if isinstance(value, Handle):
                self._tensors.check([value])
        finally:
            self._emitting.pop(id(value), None)
        content: dict[str, Any]
        if modality == "text":
            content = {"text": data.decode()}
        else:
            media = self._graph.media.get(modality, {})
            metadata = {"dtype": array.dtype, "shape": list(array.shape), **media}
            content = {"modality": modality, "data": data, "metadata": metadata}
        self._tracks.release(node, content)
        await self._tracks.of(node).wait_for_room()

    async def keep(self, results: Mapping[str, Any]) -> dict[str, Handle]:
        """Keep a walk's results for the request; the values of a list are named `name.0`, `name.1`, ..."""
        kept: dict[str, Handle] = {}
        for name, value in results.items():
            if isinstance(value, list):
                kept |= {f"{name}.{index}": await self._tensors.keep(one) for index, one in enumerate(value)}
            else:
                kept[name] = await self._tensors.keep(value)
        return kept

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


def _flat(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]
