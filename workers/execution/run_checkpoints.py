"""Checkpoints of the runs of one step: programs of KV nodes, and stepped stateless nodes (ADR 45)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.checkpoints import State
from shared.events import WalkCall, digest_of
from shared.walks import Firing
from workers.data_plane.port import Array
from workers.execution.stored_arrays import array_of, stored


class Reports(Protocol):
    """Stores states (`workers.execution.step_values.StepValues`)."""

    def checkpoint(self, place: str, state: State) -> None: ...


class RunCheckpoints:
    """The states that runs store, and those that an attempt finds of earlier ones.

    Args:
        step: the index of the step.
        calls: of its walks.
        found: the states that earlier attempts have stored, by place.
    """

    def __init__(
        self, step: int, calls: Sequence[WalkCall], found: Mapping[str, State], reports: Reports
    ) -> None:
        self._step = step
        self._calls = calls
        self._found = found
        self._reports = reports

    def state(self, walk_index: int, firing: Firing) -> dict[str, Array]:
        """The state with which the run of a node call goes on; empty if it begins."""
        if not self._found:  # nearly always: a digest for each node call would cost more than small nodes
            return {}
        state = self._found.get(self._place(walk_index, firing), {})
        return {name: array_of(one) for name, one in state.items()}

    def store(self, walk_index: int, firing: Firing, state: Mapping[str, Array]) -> None:
        """Store the state of the run of a node call, if the log has room for it."""
        self._reports.checkpoint(self._place(walk_index, firing), stored(state))

    def _place(self, walk_index: int, firing: Firing) -> str:
        """The name of a run's checkpoints, which no other run of the request has.

        The index of a step may be another step's in a later attempt: its walk and arguments have to agree.
        """
        call = self._calls[walk_index]
        return digest_of((self._step, walk_index, call.name, call.args, firing.node, firing.path))
