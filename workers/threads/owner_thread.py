"""A daemon thread that makes an object and is its only user; an event loop starts it and waits for its end.

An engine is loaded in its own thread, for its device's streams and thread counts belong to that thread, and
the event loop must not wait for a load that takes seconds.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final, Generic, TypeVar

T = TypeVar("T")

CLOSE_S: Final = 5.0
"""The longest wait for the thread's end in `join`; a thread that hangs ends with the process."""


class OwnerThread(Generic[T]):
    """Runs `serve(make())` in a daemon thread.

    Args:
        name: the name of the thread.
        make: makes the object; called in the thread.
        serve: uses the object until the thread is to end; called in the thread.
        on_death: called in the thread with the error that `serve` raised, before `wait` raises it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], T],
        serve: Callable[[T], None],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._make = make
        self._serve = serve
        self._on_death = on_death
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Errors are results here: asyncio logs a future's exception if its waiter was cancelled before.
        self._made: Future[T | BaseException] = Future()
        self._ended: Future[BaseException | None] = Future()

    async def start(self) -> T:
        """Start the thread, and wait for the object; raise what `make` raised.

        The object belongs to the thread: the caller may read its constants, but call nothing.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        made = await asyncio.shield(asyncio.wrap_future(self._made))
        if isinstance(made, BaseException):
            raise made
        return made

    async def wait(self) -> None:
        """Wait for the end of the thread; raise what `serve` raised."""
        error = await asyncio.shield(asyncio.wrap_future(self._ended))
        if error is not None:
            raise error

    async def join(self) -> None:
        """Wait at most `CLOSE_S` for the end of the thread; not at all while the object is being made."""
        if self._made.done() and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    @property
    def made(self) -> T | None:
        """The object; None while it is being made, and if making it failed."""
        made = self._made.result() if self._made.done() else None
        return None if isinstance(made, BaseException) else made

    def on_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Schedule `callback` on the event loop, from the thread. Does nothing if the loop is closed."""
        assert self._loop is not None, "started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:  # noqa: BLE001 - raised again by `start`
            self._made.set_result(error)
            self._ended.set_result(None)
            return
        self._made.set_result(made)
        end: BaseException | None = None
        try:
            self._serve(made)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            end = error
            if self._on_death is not None:
                self._on_death(error)
        finally:
            self._ended.set_result(end)
