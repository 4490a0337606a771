"""Programs of KV nodes in one step: a node call whose walk names a program is one run in the KV engine.

The inputs and outputs of such a call are ordinary arrays. In a loop, the calls of all iterations may be one
run, which keeps its contexts in between (`models.programs.Turn`). It ends with its walk.

The state of a run exists only on the device. A run that is interrupted continues after its newest checkpoint
in the log (ADR 45), or starts again from its inputs.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from models.programs import PROGRAM
from shared.checkpoints import State, StoredArray
from shared.errors import BugError
from shared.events import NodeReady, digest_of
from shared.walks import Firing
from workers.data_plane.port import Array, DeviceArray
from workers.generation.engine_client import EngineClient
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.orders.inbox import StepKey


class Reports(Protocol):
    """Takes what runs report while they go on (`workers.execution.step_values.StepValues`)."""

    def advise(self, node: str, progress: Mapping[str, Any], previews: Mapping[str, Array]) -> None: ...
    def checkpoint(self, place: str, state: State) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of one node call.

    Attributes:
        outputs: by edge.
        facts: `counts`, if the driver counts anything.
    """

    outputs: Mapping[str, Array]
    facts: Mapping[str, Any]


class ProgramHandle:
    """One run in the engine, from its submission to its end.

    Args:
        place: the name of the checkpoints of its first node call; those of later calls are not stored.

    Attributes:
        called: done at the end of the present node call, with its output; raises its error.
        ended: done at the end of the run; raises its error.
    """

    def __init__(self, key: str, node: str, place: str, reports: Reports) -> None:
        self.key: Final = key
        self.ended: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self.called: asyncio.Future[ProgramOutput] = asyncio.get_running_loop().create_future()
        self._node = node
        self._place = place
        self._reports = reports

    @property
    def is_parked(self) -> bool:
        """True if the run waits for the call of the next iteration."""
        return self.called.done() and not self.ended.done()

    def call_again(self) -> None:
        """Begin the node call of the next iteration.

        Raises:
            DalSegnoError: the run has failed since the call before.
        """
        if self.ended.done():
            self.ended.result()
        self._place = ""  # a later attempt enters the loop at its first call: no other state fits there
        self.called = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> None:
        """Take an output or a report of an engine step."""
        match output:
            case ProgramReport():
                self._reports.advise(self._node, output.progress, output.previews)
                if output.state and self._place:
                    self._reports.checkpoint(self._place, _stored(output.state))
            case ProgramOutput():
                self.called.set_result(output)
                if output.finish is not None:
                    self.ended.set_result(None)
            case _:
                raise BugError(
                    f"run {self.key}: expected the outputs of a program, found {type(output).__name__}"
                )

    def fail(self, error: Exception) -> None:
        """End the run with an error."""
        for future in (self.called, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: it is no error if nothing awaits this future


def _stored(state: Mapping[str, Array]) -> State:
    return {name: StoredArray(one.dtype, one.shape, one.data.tobytes()) for name, one in state.items()}


def _array(stored: StoredArray) -> Array:
    return Array(dtype=stored.dtype, shape=stored.shape, data=np.frombuffer(stored.data, np.uint8))


class ProgramRuns:
    """The runs of one step.

    Args:
        reports: takes what runs report while they go on.
        checkpoints: the states that earlier attempts have stored, by place.

    Attributes:
        keys: the keys of the runs in the engine.
    """

    def __init__(
        self,
        key: StepKey,
        ready: NodeReady,
        engine: EngineClient,
        reports: Reports,
        checkpoints: Mapping[str, State],
    ) -> None:
        self.keys: Final[set[str]] = set()
        self._key = key
        self._ready = ready
        self._engine = engine
        self._reports = reports
        self._checkpoints = checkpoints
        self._parked: dict[tuple[object, ...], ProgramHandle] = {}

    def is_asked(self, walk_index: int) -> bool:
        """True if the walk names a program."""
        return PROGRAM in self._ready.walks[walk_index].args

    async def run(
        self, walk_index: int, firing: Firing, inputs: Mapping[str, Array | DeviceArray]
    ) -> CallResult:
        """Run the program that a walk names, on the node that fires.

        Raises:
            DalSegnoError: the run failed.
        """
        loop = (walk_index, firing.node, *firing.path[:-1])
        handle = self._parked.pop(loop, None)
        if handle is not None:
            handle.call_again()
            self._engine.continue_run(RunInputs(key=handle.key, node=firing.node, inputs=inputs))
        else:
            handle = self._start(walk_index, firing, inputs)
        try:
            output = await handle.called
        finally:
            if handle.ended.done():
                self.keys.discard(handle.key)
        if handle.is_parked:
            if not firing.path:
                raise BugError(f"node {firing.node!r} is in no loop, but its program returned a Turn")
            self._parked[loop] = handle
        return CallResult(
            outputs=output.values, facts={"counts": dict(output.counts)} if output.counts else {}
        )

    async def end_walk(self, walk_index: int) -> None:
        """End the runs that wait for a further iteration of a walk."""
        for loop in [one for one in self._parked if one[0] == walk_index]:
            key = self._parked.pop(loop).key
            await self._engine.drop(key)
            self.keys.discard(key)

    def _start(
        self, walk_index: int, firing: Firing, inputs: Mapping[str, Array | DeviceArray]
    ) -> ProgramHandle:
        call = self._ready.walks[walk_index]
        key = ".".join(map(str, (self._key, firing.node, walk_index, *firing.path)))
        # The index of a step may be another step's in a later attempt: its walk and arguments have to agree.
        place = digest_of((self._key.step, walk_index, call.name, call.args, firing.node, firing.path))
        handle = ProgramHandle(key, firing.node, place, self._reports)
        spec = ProgramSpec(
            key=handle.key,
            node=firing.node,
            program=str(call.args[PROGRAM]),
            inputs=inputs,
            args=call.args,
            seed=self._ready.seed,
            priority=self._ready.priority,
            tenant=self._ready.tenant,
            state={name: _array(one) for name, one in self._checkpoints.get(place, {}).items()},
        )
        self._engine.submit(spec, handle)
        self.keys.add(handle.key)
        return handle
