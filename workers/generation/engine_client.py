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
from workers.generation.sequence_handle import SequenceHandle
from workers.kv_engine.outputs import Output
from workers.kv_engine.sequence_spec import SequenceSpec

_LOGGER: Final = logging.getLogger(__name__)


class EnginePort(Protocol):
    """What rows ask of the engine's thread (`workers.kv_engine.thread.EngineThread`)."""

    def submit(self, spec: SequenceSpec) -> None: ...
    def cancel(self, key: str) -> None: ...
    def hold(self, key: str) -> None: ...
    def resume(self, key: str) -> None: ...


class EngineClient:
    """All rows by key, and the callbacks the engine's thread needs. `engine` is set once it is made."""

    def __init__(self) -> None:
        self.engine: EnginePort | None = None
        self._rows: dict[str, SequenceHandle] = {}
        self._drops: dict[str, asyncio.Future[int]] = {}
        self._held: dict[str, set[object]] = {}

    def submit(self, spec: SequenceSpec, row: SequenceHandle) -> None:
        """Hand a sequence to the engine.

        Raises:
            CapacityError: the engine has too many.
        """
        assert self.engine is not None
        self.engine.submit(spec)
        self._rows[row.key] = row

    async def drop(self, key: str) -> int:
        """Take a row out of the engine; how many more steps held it. 0 when it is not there any more."""
        if self._forget(key) is None:
            return 0
        assert self.engine is not None
        dropped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drops[key] = dropped
        self.engine.cancel(key)
        return await dropped

    def hold(self, key: str, by: object) -> None:
        """Let the engine compute no more of a row for now; it keeps its place.

        Several may hold it, each for a reason of its own: it goes on when the last lets it.
        """
        if key not in self._rows:
            return
        holders = self._held.setdefault(key, set())
        if not holders:
            assert self.engine is not None
            self.engine.hold(key)
        holders.add(by)

    def resume(self, key: str, by: object) -> None:
        """Let a row go on that was held `by` whoever says so."""
        holders = self._held.get(key, set())
        holders.discard(by)
        if key in self._held and not holders:
            del self._held[key]
            assert self.engine is not None
            self.engine.resume(key)

    # ---- called by the engine's thread, on the loop ------------------------------------------------
    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """What a step led to."""
        for output in outputs:
            row = self._rows.get(output.key)
            if row is None:
                continue  # its answer has ended, or it was dropped
            faults.reach("worker.token.computed")
            try:
                row.take(output)
            except Exception as error:  # one row's text must not hold up the others
                _LOGGER.exception("the text of %s failed", output.key, extra=MAY_QUOTE)
                row.fail(error)
            self._settle(row, in_engine=output.finish is None)

    def on_error(self, keys: Sequence[str], error: DalSegnoError) -> None:
        """The engine gave these up."""
        for key in keys:
            if (row := self._forget(key)) is not None:
                row.fail(error)

    def on_cancelled(self, key: str, steps_after: int) -> None:
        """The engine has forgotten a sequence."""
        dropped = self._drops.pop(key, None)
        if dropped is not None and not dropped.done():
            dropped.set_result(steps_after)

    def _settle(self, row: SequenceHandle, *, in_engine: bool) -> None:
        """Take the row out where its text, or the engine, has come to an end."""
        if not row.ended.done() and not in_engine:
            row.fail(BugError(f"the engine ended {row.key} before its answer ended"))
        if not row.ended.done():
            return
        self._forget(row.key)
        if in_engine:
            assert self.engine is not None
            self.engine.cancel(row.key)

    def _forget(self, key: str) -> SequenceHandle | None:
        self._held.pop(key, None)
        return self._rows.pop(key, None)
