"""The engine thread: it owns the KV engine and its device, next to the event loop.

Two bounded mailboxes connect the thread and the loop. Requests, cancellations and holds go to the engine,
which reads them between steps; when that mailbox is full, `submit` refuses. Outputs and failures go to the
loop, with one wake-up per step; when that mailbox is full, the engine waits. An idle engine first prepares
for later requests (`KVEngine.prepare`), and then blocks on its mailbox.

The engine is made in the thread, too. Imports no torch.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from shared.errors import BugError, CapacityError, ClientError, DalSegnoError, WorkerError
from shared.telemetry.log_fields import quoting
from workers.data_plane.port import Array
from workers.kv_engine.counters import EngineStats
from workers.kv_engine.outputs import Output, StepFailedError
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.threads.mailbox import Mailbox
from workers.threads.owner_thread import OwnerThread

_LOGGER: Final = logging.getLogger(__name__)

INBOX_CAPACITY: Final = 4096
OUTBOX_CAPACITY: Final = 64


class Engine(Protocol):
    """The engine that the thread runs (`workers.kv_engine.engine.KVEngine`)."""

    @property
    def has_work(self) -> bool: ...
    @property
    def step_keys(self) -> tuple[str, ...]: ...
    def add(self, spec: SequenceSpec) -> None: ...
    def add_program(self, spec: ProgramSpec) -> None: ...
    def continue_program(self, given: RunInputs) -> Output | None: ...
    def cancel(self, key: str) -> bool: ...
    def hold(self, key: str) -> bool: ...
    def resume(self, key: str) -> bool: ...
    def feed(self, key: str, items: Array | None, *, ended: bool) -> bool: ...
    def prepare(self) -> bool: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: str


@dataclass(frozen=True, slots=True)
class _Hold:
    key: str
    held: bool


@dataclass(frozen=True, slots=True)
class _Feed:
    key: str
    items: Array | None
    ended: bool


@dataclass(frozen=True, slots=True)
class _Failed:
    keys: tuple[str, ...]
    error: DalSegnoError


@dataclass(frozen=True, slots=True)
class _Cancelled:
    key: str
    steps_after: int


_Command: TypeAlias = SequenceSpec | ProgramSpec | RunInputs | _Cancel | _Hold | _Feed
_Report: TypeAlias = list[Output] | _Failed | _Cancelled


class EngineThread(OwnerThread[Engine]):
    """Runs a KV engine in its own thread.

    Each sequence ends with exactly one of: an output with `finish`, `on_error`, `on_cancelled`. A cancelled
    sequence may end before the engine reads the cancellation; `on_cancelled` is called nevertheless.

    Args:
        engine_factory: makes the engine; called in the thread.
        on_outputs: called on the loop with the outputs of a step.
        on_error: called on the loop with the keys of failed sequences, which have left the engine, and the
            error.
        on_cancelled: called on the loop once per `cancel`: the key, and the number of steps with the sequence
            that were completed after the call.
    """

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        on_outputs: Callable[[list[Output]], None],
        on_error: Callable[[tuple[str, ...], DalSegnoError], None],
        *,
        on_cancelled: Callable[[str, int], None],
    ) -> None:
        super().__init__("engine", engine_factory, self._serve_engine, self._die)
        self._on_outputs = on_outputs
        self._on_error = on_error
        self._on_cancelled = on_cancelled
        self._inbox: Mailbox[_Command] = Mailbox(INBOX_CAPACITY)
        self._outbox: Mailbox[_Report] = Mailbox(OUTBOX_CAPACITY)
        # Steps since `cancel` was called, by key. Single dict operations are atomic in CPython.
        self._steps_after: dict[str, int] = {}

    # ---- called on the event loop ------------------------------------------------------------------
    async def close(self) -> None:
        """Stop after the current step; unfinished sequences are forgotten.

        An engine that is still loading is not waited for: its thread ends after the load, or with the
        process.
        """
        self._inbox.close()
        self._outbox.close()
        await self.join()

    def submit(self, spec: SequenceSpec | ProgramSpec | RunInputs) -> None:
        """Send a sequence, a run of a program, or its next inputs, to the engine.

        Raises:
            CapacityError: too many commands are queued, or the engine is closed.
        """
        if self._inbox.try_put(spec):
            return
        reason = "is closed" if self._inbox.is_closed else f"has {INBOX_CAPACITY} requests queued"
        raise CapacityError(f"the engine {reason}; try again later")

    def cancel(self, key: str) -> None:
        """Remove a sequence before the next step; confirmed by `on_cancelled`."""
        self._steps_after[key] = 0
        self._inbox.try_put(_Cancel(key), force=True)

    def hold(self, key: str) -> None:
        """Exclude a sequence from steps, from the next one on, until it is resumed or cancelled.

        It keeps its row and blocks. The current step may still output its tokens. An unknown key is ignored:
        the sequence may have ended meanwhile.
        """
        self._inbox.try_put(_Hold(key, held=True), force=True)

    def resume(self, key: str) -> None:
        """Let a held sequence take part in steps again."""
        self._inbox.try_put(_Hold(key, held=False), force=True)

    def feed(self, key: str, items: Array | None, *, ended: bool) -> None:
        """Give a fed sequence the stream's next items, stacked; with `ended`, no further ones follow."""
        self._inbox.try_put(_Feed(key, items, ended), force=True)

    def stats(self) -> EngineStats | None:
        """Return the engine's state, without waiting for the engine; None while it is being made."""
        engine = self.made
        return engine.stats() if engine is not None else None

    def _deliver(self) -> None:
        for report in self._outbox.take(wait=False):
            match report:
                case list():
                    self._on_outputs(report)
                case _Failed(keys, error):
                    self._on_error(keys, error)
                case _Cancelled(key, steps_after):
                    self._on_cancelled(key, steps_after)

    # ---- called in the thread ----------------------------------------------------------------------
    def _serve_engine(self, engine: Engine) -> None:
        while not self._inbox.is_closed:
            self._execute(engine, self._inbox.take(wait=not engine.has_work and not engine.prepare()))
            if engine.has_work and not self._inbox.is_closed:
                self._step(engine)

    def _die(self, error: BaseException) -> None:
        _LOGGER.critical("the engine thread died: %s: %s", type(error).__name__, error)
        self._inbox.close()

    def _execute(self, engine: Engine, commands: Iterable[_Command]) -> None:
        for command in commands:
            match command:
                case SequenceSpec() | ProgramSpec():
                    self._add(engine, command)
                case RunInputs():
                    self._continue(engine, command)
                case _Cancel(key):
                    engine.cancel(key)
                    self._report(_Cancelled(key, self._steps_after.pop(key, 0)))
                case _Hold(key, held):
                    _ = engine.hold(key) if held else engine.resume(key)
                case _Feed():
                    self._feed(engine, command)

    def _add(self, engine: Engine, spec: SequenceSpec | ProgramSpec) -> None:
        try:
            if isinstance(spec, ProgramSpec):
                engine.add_program(spec)
            else:
                engine.add(spec)
        except (ClientError, WorkerError, BugError) as error:
            self._report(_Failed((spec.key,), error))

    def _continue(self, engine: Engine, given: RunInputs) -> None:
        try:
            output = engine.continue_program(given)
        except DalSegnoError as error:
            self._report(_Failed((given.key,), error))
            return
        if output is not None:
            self._report([output])

    def _feed(self, engine: Engine, command: _Feed) -> None:
        try:
            engine.feed(command.key, command.items, ended=command.ended)
        except DalSegnoError as error:
            engine.cancel(command.key)
            self._report(_Failed((command.key,), error))

    def _step(self, engine: Engine) -> None:
        failure: StepFailedError | None = None
        try:
            outputs = engine.step()
        except StepFailedError as error:
            _log_failures(error)
            outputs, failure = error.outputs, error
        for key in engine.step_keys:
            if key in self._steps_after:
                self._steps_after[key] += 1
        if outputs:
            self._report(outputs)
        if failure is None:
            return
        if failure.keys:
            self._report(_Failed(failure.keys, WorkerError(failure.message, code=failure.failure_code)))
        for key, other in failure.others.items():
            self._report(_Failed((key,), other))

    def _report(self, report: _Report) -> None:
        if self._outbox.put(report):
            self.on_loop(self._deliver)


def _log_failures(failed: StepFailedError) -> None:
    """Log the failed sequences of a step: a fault with its traceback, a request that is wrong in one line."""
    faults = {key: error for key, error in failed.others.items() if not isinstance(error, ClientError)}
    if failed.keys or faults:
        _LOGGER.error("an engine step failed for some sequences", exc_info=failed)
    for key, error in failed.others.items():
        if key not in faults:
            _LOGGER.warning("sequence %s failed: %s", key, error.code, extra=quoting(error.message))
