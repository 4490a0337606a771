"""Event-loop client of the engine thread: it submits, holds, resumes and drops sequences.

The engine thread delivers the outputs of each engine step to `on_outputs`. The client passes every output to
the handle of its sequence, while the engine computes its next step. A sequence leaves the client when its
generated text ends, when the engine gives it up, or when it is dropped. A stop string ends the text before
the engine knows about it: the client then cancels the sequence there, and ignores tokens still in flight.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from shared import faults
from shared.errors import BugError, DalSegnoError
from shared.telemetry.log_fields import MAY_QUOTE
from workers.data_plane.port import Array
from workers.kv_engine.outputs import Output
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import SequenceSpec

_LOGGER: Final = logging.getLogger(__name__)


class EngineHandle(Protocol):
    """The client's side of a sequence, or of a run of a program, in the engine.

    Attributes:
        ended: done once nothing more is wanted of it.
    """

    @property
    def key(self) -> str: ...
    @property
    def ended(self) -> "asyncio.Future[None]": ...
    def take(self, output: Output) -> None: ...
    def fail(self, error: Exception) -> None: ...


class EnginePort(Protocol):
    """The engine thread as the client uses it (`workers.kv_engine.thread.EngineThread`)."""

    def submit(self, spec: SequenceSpec | ProgramSpec | RunInputs) -> None: ...
    def cancel(self, key: str) -> None: ...
    def hold(self, key: str) -> None: ...
    def resume(self, key: str) -> None: ...
    def feed(self, key: str, items: Array | None, *, ended: bool) -> None: ...


class EngineClient:
    """The live sequences, and the callbacks of the engine thread. Set `engine` before the first use."""

    def __init__(self) -> None:
        self.engine: EnginePort | None = None
        self._handles: dict[str, EngineHandle] = {}
        self._drops: dict[str, asyncio.Future[int]] = {}
        self._holders: dict[str, set[object]] = {}

    def submit(self, spec: SequenceSpec | ProgramSpec, handle: EngineHandle) -> None:
        """Submit a sequence, or a run of a program, to the engine.

        Raises:
            CapacityError: the engine has too many sequences.
        """
        assert self.engine is not None
        spec.work.queue()
        self.engine.submit(spec)
        self._handles[handle.key] = handle

    def continue_run(self, given: RunInputs) -> None:
        """Give a run that waits for its next iteration the inputs of it; its handle takes the output.

        Raises:
            CapacityError: the engine has too many commands queued.
        """
        assert self.engine is not None
        self.engine.submit(given)

    async def drop(self, key: str) -> int:
        """Cancel a sequence in the engine; return the number of engine steps that still held it.

        It is 0 where the sequence has already left the engine.
        """
        if self._forget(key) is None:
            return 0
        assert self.engine is not None
        dropped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drops[key] = dropped
        self.engine.cancel(key)
        return await dropped

    def hold(self, key: str, by: object) -> None:
        """Pause a sequence in the engine; it keeps its place there.

        Several holders may pause it independently. It resumes when the last of them resumes it.
        """
        if key not in self._handles:
            return
        holders = self._holders.setdefault(key, set())
        if not holders:
            assert self.engine is not None
            self.engine.hold(key)
        holders.add(by)

    def resume(self, key: str, by: object) -> None:
        """Withdraw one holder's pause of a sequence."""
        holders = self._holders.get(key, set())
        holders.discard(by)
        if key in self._holders and not holders:
            del self._holders[key]
            assert self.engine is not None
            self.engine.resume(key)

    def feed(self, key: str, items: Array | None, *, ended: bool) -> None:
        """Give a fed sequence the stream's next items, stacked; with `ended`, no further ones follow."""
        if key in self._handles:
            assert self.engine is not None
            self.engine.feed(key, items, ended=ended)

    # ---- called by the engine thread, on the event loop --------------------------------------------
    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """Take the outputs of an engine step."""
        for output in outputs:
            handle = self._handles.get(output.key)
            if handle is None:
                continue  # its text has ended, or it was dropped
            faults.reach("worker.token.computed")
            try:
                handle.take(output)
            except Exception as error:  # an error in one sequence's text must not stop the others
                _LOGGER.exception("the text of %s failed", output.key, extra=MAY_QUOTE)
                handle.fail(error)
            self._settle(handle, in_engine=output.finish is None)

    def on_error(self, keys: Sequence[str], error: DalSegnoError) -> None:
        """Fail the sequences that the engine gave up."""
        for key in keys:
            if (handle := self._forget(key)) is not None:
                handle.fail(error)

    def on_cancelled(self, key: str, steps_after: int) -> None:
        """Complete `drop`: the engine has forgotten the sequence."""
        dropped = self._drops.pop(key, None)
        if dropped is not None and not dropped.done():
            dropped.set_result(steps_after)

    def _settle(self, handle: EngineHandle, *, in_engine: bool) -> None:
        """Forget the sequence if its text, or the engine, has ended it."""
        if not handle.ended.done() and not in_engine:
            handle.fail(BugError(f"the engine ended sequence {handle.key} before its generated text ended"))
        if not handle.ended.done():
            return
        self._forget(handle.key)
        if in_engine:
            assert self.engine is not None
            self.engine.cancel(handle.key)

    def _forget(self, key: str) -> EngineHandle | None:
        self._holders.pop(key, None)
        return self._handles.pop(key, None)
