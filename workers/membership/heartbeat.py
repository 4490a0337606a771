"""Beats from a thread of their own: who is busy must not look dead.

    main loop ──vital signs, when it is asked──┐
    the thread, every 0.5 s ──asks─────────────┴──> beat: what the loop said last, and how long ago

The thread has a small event loop and a connection of its own, so a main loop that is blocked, or whose
connection is lost, beats on. It asks the main loop before each beat: what that counts is read there alone,
where nothing changes meanwhile, and handed over whole. A loop that does not answer is told of by its last
vital signs and `loop_age_s`; whether that is too long is the conductor's to judge.

A process that stands still altogether (stopped, or all its threads behind one lock) does not beat.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from threading import Thread
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from shared.errors import DalSegnoError

_LOGGER: Final = logging.getLogger(__name__)

BEAT_S: Final = 0.5
ANSWER_S: Final = 0.05
"""So soon a loop that turns has answered; a beat waits no longer for it."""


class Line(Protocol):
    """Where beats go (`shared.log.nats.heartbeat_connection.BeatLine`)."""

    async def beat(self, subject: str, data: bytes) -> None: ...
    async def close(self) -> None: ...


OpenLine: TypeAlias = Callable[[], Awaitable[Line]]
"""Makes the connection; called in the thread's loop, again and again until it comes."""
Signs: TypeAlias = Callable[[], Mapping[str, Any]]
"""The vital signs; called on the main loop."""


class Pulse:
    """Tells on `subject` that this process lives."""

    def __init__(self, subject: str, open_line: OpenLine, *, every_s: float = BEAT_S) -> None:
        self._subject = subject
        self._open_line = open_line
        self._every_s = every_s

    async def run(self, signs: Signs) -> None:
        """Beat until cancelled; behind it no beat goes out.

        Raises:
            Exception: whatever `signs` raised, or the thread died of.
        """
        beating = _Beating(self._subject, self._open_line, self._every_s, signs)
        thread = Thread(target=beating.thread, name="beats", daemon=True)
        thread.start()
        try:
            await asyncio.shield(beating.ended)
        finally:
            beating.stop()
            await asyncio.wait([beating.ended], timeout=self._every_s)
            if beating.ended.done():
                beating.ended.exception()  # told above, or too late to matter


class _Beating:
    """One run of a pulse: what its two loops hand to each other.

    Attributes:
        ended: on the main loop: the thread is done, and what it died of.
    """

    def __init__(self, subject: str, open_line: OpenLine, every_s: float, signs: Signs) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._main = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._subject = subject
        self._open_line = open_line
        self._every_s = every_s
        self._signs = signs
        self._stopping = asyncio.Event()
        self._answered = asyncio.Event()
        self._asked_s: float | None = None  # when the question that waits for its answer was put
        self._said: Mapping[str, Any] | None = None
        self._failure: Exception | None = None

    # ---- on the main loop --------------------------------------------------------------------------
    def stop(self) -> None:
        """Beat no more."""
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _answer(self) -> None:
        try:
            self._said = self._signs()
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            self._failure = error
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answered.set)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    # ---- in the thread -----------------------------------------------------------------------------
    def thread(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_stopped())
        except BaseException as died:  # noqa: BLE001 - raised again by `run`
            error = died
        with contextlib.suppress(RuntimeError):  # the main loop is closed: nobody asks
            self._main.call_soon_threadsafe(self._end, error)

    async def _until_stopped(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat())
            await self._stopping.wait()
            beating.cancel()

    async def _beat(self) -> None:
        line = await self._opened()
        try:
            while True:
                await self._ask()
                if self._said is not None:
                    told = {**self._said, "loop_age_s": round(self._age_s(), 3)}
                    await line.beat(self._subject, msgspec.msgpack.encode(told))
                slept_s = time.monotonic()
                await asyncio.sleep(self._every_s)
                if self._asked_s is not None and time.monotonic() - slept_s > 2 * self._every_s:
                    self._asked_s = time.monotonic()  # this thread stood still, too: the loop is not to blame
        finally:
            await line.close()

    async def _opened(self) -> Line:
        while True:
            try:
                return await self._open_line()
            except DalSegnoError as error:
                _LOGGER.debug("no beats yet: %s", error)
            await asyncio.sleep(self._every_s)

    async def _ask(self) -> None:
        """Have the main loop say how it is, and give it a moment to."""
        if self._asked_s is None or self._answered.is_set():
            self._asked_s = time.monotonic()
            self._answered.clear()
            try:
                self._main.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it is closed: the process ends
                self._stopping.set()
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
            self._asked_s = None
        if self._failure is not None:
            raise self._failure

    def _age_s(self) -> float:
        """For how long, at least, the main loop has not turned."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s
