"""The engine's thread: it alone owns the engine and the device; the event loop is beside it.

Between the two are two bounded mailboxes and nothing else. Towards the engine: sequences, cancellations,
and who is to be held, read at every step boundary; when it is full, `submit` refuses. Towards the loop:
what a step led to, one wake-up per step; when that is full, the engine waits. An idle engine prepares what
it can for the next requests, and then blocks on its mailbox.

The engine is made in the thread too, for it loads the model there. No torch is imported here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Final, Protocol, TypeAlias

from shared.errors import BugError, CapacityError, ClientError, DalSegnoError, WorkerError
from workers.kv_engine.counters import EngineStats
from workers.kv_engine.failures import StepFailedError
from workers.kv_engine.outputs import Output
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.threads.mailbox import Mailbox

_LOGGER: Final = logging.getLogger(__name__)

INBOX_CAPACITY: Final = 4096
OUTBOX_CAPACITY: Final = 64
CLOSE_S: Final = 5.0
"""How long a step may take that is waited for at the end; one that hangs ends with the process."""


class Engine(Protocol):
    """What the thread drives (see `KVEngine`)."""

    @property
    def has_work(self) -> bool: ...
    @property
    def step_keys(self) -> tuple[str, ...]: ...
    def add(self, spec: SequenceSpec) -> None: ...
    def cancel(self, key: str) -> bool: ...
    def hold(self, key: str) -> bool: ...
    def resume(self, key: str) -> bool: ...
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
class _Failed:
    keys: tuple[str, ...]
    error: DalSegnoError


@dataclass(frozen=True, slots=True)
class _Cancelled:
    key: str
    steps_after: int


_Order: TypeAlias = SequenceSpec | _Cancel | _Hold
_Report: TypeAlias = list[Output] | _Failed | _Cancelled


class EngineThread:
    """Runs an engine beside the event loop.

    Args:
        engine_factory: makes the engine; called in the thread.
        on_outputs: called on the loop with what a step led to.
        on_error: called on the loop with sequences that failed, and why; they are gone.
        on_cancelled: called on the loop once for every `cancel`: the key, and how many steps that were
            completed after the call still held the sequence.

    A sequence ends with exactly one of: an output with `finish`, `on_error`, `on_cancelled`. A
    cancelled one may end before the cancellation is seen; `on_cancelled` follows nevertheless.
    """

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        on_outputs: Callable[[list[Output]], None],
        on_error: Callable[[tuple[str, ...], DalSegnoError], None],
        *,
        on_cancelled: Callable[[str, int], None],
    ) -> None:
        self._factory = engine_factory
        self._on_outputs = on_outputs
        self._on_error = on_error
        self._on_cancelled = on_cancelled
        self._inbox: Mailbox[_Order] = Mailbox(INBOX_CAPACITY)
        self._outbox: Mailbox[_Report] = Mailbox(OUTBOX_CAPACITY)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._ready: Future[Engine] = Future()
        self._ended: Future[None] = Future()
        # Steps counted since `cancel` was called. Single dict operations are atomic in CPython.
        self._steps_after: dict[str, int] = {}

    # ---- the loop's side ---------------------------------------------------------------------------
    async def start(self) -> Engine:
        """Start the thread, and wait until the engine is made; what its factory raises is raised here.

        The engine is the thread's own: read its constants, call nothing.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.shield(asyncio.wrap_future(self._ready))

    async def wait(self) -> None:
        """Wait until the thread has ended; raise what it died of."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def close(self) -> None:
        """Stop after the step that is running; what is unfinished is forgotten.

        A model that is still loading is not waited for: the thread ends by itself when it is there, or
        with the process.
        """
        self._inbox.close()
        self._outbox.close()
        if self._ready.done() and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    def submit(self, spec: SequenceSpec) -> None:
        """Hand a sequence to the engine.

        Raises:
            CapacityError: too many are waiting to be taken over, or the engine is closed.
        """
        if self._inbox.try_put(spec):
            return
        what = "is closed" if self._inbox.is_closed else f"has {INBOX_CAPACITY} requests queued"
        raise CapacityError(f"the engine {what}; try again later")

    def cancel(self, key: str) -> None:
        """Forget a sequence, effective at the next step boundary; reported by `on_cancelled`."""
        self._steps_after[key] = 0
        self._inbox.try_put(_Cancel(key), force=True)

    def hold(self, key: str) -> None:
        """Compute no more of a sequence, from the next step boundary on, until it is resumed or cancelled.

        It keeps its place. Tokens of the step that is running still come. Of one that is not there
        (any more) nothing is said: it may have ended meanwhile.
        """
        self._inbox.try_put(_Hold(key, held=True), force=True)

    def resume(self, key: str) -> None:
        """Let a sequence that is held go on."""
        self._inbox.try_put(_Hold(key, held=False), force=True)

    def stats(self) -> EngineStats | None:
        """The engine's counters, read without waiting for it; None while it is being made."""
        return self._ready.result().stats() if self._ready.done() and not self._ready.exception() else None

    def _deliver(self) -> None:
        for report in self._outbox.take(wait=False):
            match report:
                case list():
                    self._on_outputs(report)
                case _Failed(keys, error):
                    self._on_error(keys, error)
                case _Cancelled(key, steps_after):
                    self._on_cancelled(key, steps_after)

    # ---- the thread's side -------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            engine = self._factory()
        except BaseException as error:  # noqa: BLE001 - raised again by `start`
            self._ready.set_exception(error)
            self._ended.set_result(None)
            return
        self._ready.set_result(engine)
        try:
            while not self._inbox.is_closed:
                self._obey(engine, self._inbox.take(wait=not engine.has_work and not engine.prepare()))
                if engine.has_work and not self._inbox.is_closed:
                    self._step(engine)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            _LOGGER.critical("the engine's thread died: %s: %s", type(error).__name__, error)
            self._inbox.close()
            self._ended.set_exception(error)
            return
        self._ended.set_result(None)

    def _obey(self, engine: Engine, orders: Iterable[_Order]) -> None:
        for order in orders:
            match order:
                case SequenceSpec():
                    self._add(engine, order)
                case _Cancel(key):
                    engine.cancel(key)
                    self._report(_Cancelled(key, self._steps_after.pop(key, 0)))
                case _Hold(key, held):
                    _ = engine.hold(key) if held else engine.resume(key)

    def _add(self, engine: Engine, spec: SequenceSpec) -> None:
        try:
            engine.add(spec)
        except (ClientError, WorkerError, BugError) as error:
            self._report(_Failed((spec.key,), error))

    def _step(self, engine: Engine) -> None:
        failure: StepFailedError | None = None
        try:
            outputs = engine.step()
        except StepFailedError as error:
            _LOGGER.exception("an engine step failed for some")
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
        assert self._loop is not None
        if self._outbox.put(report):
            self._loop.call_soon_threadsafe(self._deliver)
