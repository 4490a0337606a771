"""Heartbeats from a separate thread: a busy worker must not look dead.

    main loop ──vital signs, on request────────┐
    heartbeat thread, every 0.5 s ──requests───┴──> heartbeat: the latest vital signs, and their age

The thread has its own small event loop and connection, so heartbeats continue while the main loop is
blocked or its connection is lost. Before each heartbeat the thread requests vital signs from the main loop.
Only the main loop reads its counters, so the values are consistent. If the main loop does not answer, the
heartbeat carries the latest vital signs and `loop_age_s`, the time since the unanswered request. The
conductor decides which age is too long.

A process that is stopped as a whole, or whose threads all wait for one lock, sends no heartbeats.
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

HEARTBEAT_S: Final = 0.5
ANSWER_S: Final = 0.05
"""A main loop that is not blocked answers within this time; a heartbeat waits no longer."""


class HeartbeatConnection(Protocol):
    """The connection that heartbeats are sent over (`shared.log.nats.heartbeat_connection`)."""

    async def send_heartbeat(self, subject: str, data: bytes) -> None: ...
    async def close(self) -> None: ...


OpenConnection: TypeAlias = Callable[[], Awaitable[HeartbeatConnection]]
"""Opens the connection. Called in the thread's event loop, and again after a failure."""
VitalSigns: TypeAlias = Callable[[], Mapping[str, Any]]
"""Returns the vital signs; called on the main loop."""


class Heartbeat:
    """Publishes on `subject` that this process is alive; `clock` returns seconds and never goes back."""

    def __init__(
        self,
        subject: str,
        open_connection: OpenConnection,
        *,
        every_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subject = subject
        self._open_connection = open_connection
        self._every_s = every_s
        self._clock = clock

    async def run(self, vital_signs: VitalSigns) -> None:
        """Send heartbeats until cancelled. No heartbeat is sent after this returns.

        Raises:
            Exception: what `vital_signs` raised, or what ended the thread.
        """
        running = _HeartbeatRun(self._subject, self._open_connection, self._every_s, self._clock, vital_signs)
        thread = Thread(target=running.thread, name="heartbeat", daemon=True)
        thread.start()
        try:
            await asyncio.shield(running.ended)
        finally:
            running.stop()
            await asyncio.wait([running.ended], timeout=self._every_s)
            if running.ended.done():
                running.ended.exception()  # raised above already, or too late to matter


class _HeartbeatRun:
    """The state that the main loop and the heartbeat thread share during one run.

    Attributes:
        ended: on the main loop: done when the thread has ended, with the exception that ended it.
    """

    def __init__(
        self,
        subject: str,
        open_connection: OpenConnection,
        every_s: float,
        clock: Callable[[], float],
        vital_signs: VitalSigns,
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._main = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._subject = subject
        self._open_connection = open_connection
        self._every_s = every_s
        self._clock = clock
        self._vital_signs = vital_signs
        self._stopping = asyncio.Event()
        self._answered = asyncio.Event()
        self._requested_s: float | None = None  # the time of the request that has no answer yet
        self._latest: Mapping[str, Any] | None = None
        self._failure: Exception | None = None

    # ---- on the main loop --------------------------------------------------------------------------
    def stop(self) -> None:
        """Send no more heartbeats."""
        with contextlib.suppress(RuntimeError):  # the thread's loop is closed already
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _answer(self) -> None:
        try:
            self._latest = self._vital_signs()
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
        except BaseException as raised:  # noqa: BLE001 - raised again by `run`
            error = raised
        with contextlib.suppress(RuntimeError):  # the main loop is closed
            self._main.call_soon_threadsafe(self._end, error)

    async def _until_stopped(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send_heartbeats())
            await self._stopping.wait()
            sending.cancel()

    async def _send_heartbeats(self) -> None:
        connection = await self._connect()
        try:
            while True:
                await self._request_vital_signs()
                if self._latest is not None:
                    content = {**self._latest, "loop_age_s": round(self._age_s(), 3)}
                    await connection.send_heartbeat(self._subject, msgspec.msgpack.encode(content))
                slept_s = self._clock()
                await asyncio.sleep(self._every_s)
                if self._requested_s is not None and self._clock() - slept_s > 2 * self._every_s:
                    self._requested_s = (
                        self._clock()
                    )  # this thread did not run either: the whole process stood still
        finally:
            await connection.close()

    async def _connect(self) -> HeartbeatConnection:
        while True:
            try:
                return await self._open_connection()
            except DalSegnoError as error:
                _LOGGER.debug("the heartbeat connection is not open yet: %s", error)
            await asyncio.sleep(self._every_s)

    async def _request_vital_signs(self) -> None:
        """Request the vital signs from the main loop, and wait a moment for the answer."""
        if self._requested_s is None or self._answered.is_set():
            self._requested_s = self._clock()
            self._answered.clear()
            try:
                self._main.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the main loop is closed: the process ends
                self._stopping.set()
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
            self._requested_s = None
        if self._failure is not None:
            raise self._failure

    def _age_s(self) -> float:
        """The time since the unanswered request: a lower bound for how long the main loop is blocked."""
        return 0.0 if self._requested_s is None else self._clock() - self._requested_s
