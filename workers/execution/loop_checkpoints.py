"""Checkpoints of the loops of one step: stored every few iterations, and begun with in a later attempt.

The rank of the node that feeds the loop stores the values. Every rank of a later attempt reads the log up to
that attempt, and begins with the newest checkpoint of an earlier one: all of them find the same (ADR 45).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from shared.checkpoints import State
from shared.events import WalkCall, digest_of
from shared.walks import CompiledWalk, Firing, LoopCheckpoint
from workers.data_plane.step_tensors import StepTensors, Value
from workers.execution.stored_arrays import array_of, stored

_LOGGER: Final = logging.getLogger(__name__)


class Reports(Protocol):
    """Stores states (`workers.execution.step_values.StepValues`)."""

    def checkpoint(self, place: str, state: State) -> None: ...


class LoopCheckpoints:
    """The checkpoints of the loops of one step.

    Args:
        step: its index.
        walks, calls: its walks, and their calls.
        found: the states that earlier attempts have stored, by place.
    """

    def __init__(
        self,
        step: int,
        walks: Sequence[CompiledWalk],
        calls: Sequence[WalkCall],
        *,
        found: Mapping[str, State],
        tensors: StepTensors,
        reports: Reports,
    ) -> None:
        self._step = step
        self._walks = walks
        self._calls = calls
        self._found = found
        self._tensors = tensors
        self._reports = reports

    def begun(self, walk_index: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a walk; what its loops are fed first is taken from their newest checkpoints."""
        begun = dict(inputs)
        for loop in self._walks[walk_index].checkpoints:
            state = self._found.get(self._place(walk_index, loop))
            if state is None:
                continue
            if state.keys() != set(loop.edges):
                _LOGGER.warning("loop %s begins with its inputs: its checkpoint has others", loop.loop)
                continue
            begun |= {edge: array_of(value) for edge, value in state.items()}
        return begun

    async def store(
        self, walk_index: int, firing: Firing, outputs: Mapping[str, Value], stops: Sequence[str]
    ) -> None:
        """Store what a firing feeds back, if a checkpoint is due.

        Raises:
            LostTensor: one of the values is gone.
        """
        for loop in self._walks[walk_index].checkpoints:
            if firing.node != loop.node or loop.loop in stops or (firing.path[-1] + 1) % loop.every:
                continue
            arrays = {edge: await self._tensors.array(outputs[edge]) for edge in loop.edges}
            self._reports.checkpoint(self._place(walk_index, loop), stored(arrays))

    def _place(self, walk_index: int, loop: LoopCheckpoint) -> str:
        # The index of a step may be another step's in a later attempt: its walk and arguments have to agree.
        call = self._calls[walk_index]
        return digest_of((self._step, walk_index, call.name, call.args, "loop", loop.loop))
