"""Programs of KV nodes in one step: a node call whose walk names a program is one run in the KV engine.

The inputs and outputs of such a call are ordinary arrays. In a loop, the calls of all iterations may be one
run, which keeps its contexts in between (`models.programs.Turn`). It ends with its walk.

The state of a run exists only on the device. A run that is interrupted continues after its newest checkpoint
in the log (ADR 45), or starts again from its inputs.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from models.programs import PROGRAM
from shared.errors import BugError
from shared.events import NodeReady
from shared.walks import Firing
from workers.data_plane.port import Array, DeviceArray
from workers.execution.node_works import NodeWorks
from workers.execution.run_checkpoints import RunCheckpoints
from workers.generation.engine_client import EngineClient
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.orders.inbox import StepKey

Advise: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Array]], None]
"""Shows progress, and previews by modality."""


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
        advise: shows progress and previews of the node.
        store: stores a checkpoint of the first node call; those of later calls are not stored.

    Attributes:
        called: done at the end of the present node call, with its output; raises its error.
        ended: done at the end of the run; raises its error.
    """

    def __init__(self, key: str, *, advise: Advise, store: Callable[[Mapping[str, Array]], None]) -> None:
        self.key: Final = key
        self.ended: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self.called: asyncio.Future[ProgramOutput] = asyncio.get_running_loop().create_future()
        self._advise = advise
        self._store = store
        self._is_first_call = True

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
        # A later attempt enters the loop at its first call: no other state fits there.
        self._is_first_call = False
        self.called = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> None:
        """Take an output or a report of an engine step."""
        match output:
            case ProgramReport():
                self._advise(output.progress, output.previews)
                if output.state and self._is_first_call:
                    self._store(output.state)
            case ProgramOutput():
                # A step that is cancelled waits no longer, but the engine may have made the output already.
                if not self.called.done():
                    self.called.set_result(output)
                if output.finish is not None and not self.ended.done():
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


class ProgramRuns:
    """The runs of one step.

    Args:
        advise: shows progress and previews of a node.
        checkpoints: of the step's runs.
        works: the records of the runs' work.

    Attributes:
        keys: the keys of the runs in the engine.
    """

    def __init__(
        self,
        key: StepKey,
        ready: NodeReady,
        engine: EngineClient,
        advise: Callable[[str, Mapping[str, Any], Mapping[str, Array]], None],
        checkpoints: RunCheckpoints,
        works: NodeWorks,
    ) -> None:
        self.keys: Final[set[str]] = set()
        self._key = key
        self._ready = ready
        self._engine = engine
        self._advise = advise
        self._checkpoints = checkpoints
        self._works = works
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
        handle = ProgramHandle(
            key,
            advise=partial(self._advise, firing.node),
            store=partial(self._checkpoints.store, walk_index, firing),
        )
        spec = ProgramSpec(
            key=handle.key,
            node=firing.node,
            program=str(call.args[PROGRAM]),
            inputs=inputs,
            args=call.args,
            seed=self._ready.seed,
            priority=self._ready.priority,
            tenant=self._ready.tenant,
            state=self._checkpoints.state(walk_index, firing),
            work=self._works.record(firing.node),
        )
        self._engine.submit(spec, handle)
        self.keys.add(handle.key)
        return handle
