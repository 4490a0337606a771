"""Programs of KV nodes in one step: a node call whose walk names a program is one run in the KV engine.

The inputs and outputs of such a call are ordinary arrays. A run that is interrupted starts again from its
inputs: its state exists only on the device.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from models.programs import PROGRAM
from shared.errors import BugError
from shared.events import NodeReady
from shared.walks import Firing
from workers.data_plane.port import Array, DeviceArray
from workers.generation.engine_client import EngineClient
from workers.kv_engine.outputs import Output, ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec
from workers.orders.inbox import StepKey


class ProgramHandle:
    """One run in the engine, from its submission to its end.

    Attributes:
        values: the outputs by edge, once it has ended.
        ended: done at the end of the run; raises its error.
    """

    def __init__(self, key: str) -> None:
        self.key: Final = key
        self.values: Mapping[str, Array] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> None:
        """Take the output of the engine step that ended the run."""
        if not isinstance(output, ProgramOutput):
            raise BugError(
                f"run {self.key}: expected the outputs of a program, found {type(output).__name__}"
            )
        self.values = output.values
        self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the run with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved: it is no error if nothing awaits this future


class ProgramRuns:
    """The runs of one step.

    Attributes:
        keys: the keys of the runs in the engine.
    """

    def __init__(self, key: StepKey, ready: NodeReady, engine: EngineClient) -> None:
        self.keys: Final[set[str]] = set()
        self._key = key
        self._ready = ready
        self._engine = engine

    def is_asked(self, walk_index: int) -> bool:
        """True if the walk names a program."""
        return PROGRAM in self._ready.walks[walk_index].args

    async def run(
        self, walk_index: int, firing: Firing, inputs: Mapping[str, Array | DeviceArray]
    ) -> Mapping[str, Array]:
        """Run the program that a walk names, on the node that fires; return the outputs by edge.

        Raises:
            DalSegnoError: the run failed.
        """
        call = self._ready.walks[walk_index]
        place = ".".join(map(str, (firing.node, walk_index, *firing.path)))
        handle = ProgramHandle(f"{self._key}.{place}")
        spec = ProgramSpec(
            key=handle.key,
            node=firing.node,
            program=str(call.args[PROGRAM]),
            inputs=inputs,
            args=call.args,
            seed=self._ready.seed,
            priority=self._ready.priority,
            tenant=self._ready.tenant,
        )
        self._engine.submit(spec, handle)
        self.keys.add(handle.key)
        try:
            await handle.ended
        finally:
            if handle.ended.done() and not handle.ended.cancelled():
                self.keys.discard(handle.key)
        return handle.values
