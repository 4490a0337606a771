"""Bounded concurrency for the pieces of media."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

_Result = TypeVar("_Result")
_Operation: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]

WINDOW: Final = 8
"""Pieces that one medium has in flight."""


class Flight:
    """Operations on pieces of one medium, some at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, shared: asyncio.Semaphore) -> None:
        self._tasks = tasks
        self._shared = shared
        self._own = asyncio.Semaphore(WINDOW)

    async def start(self, operation: _Operation[None]) -> None:
        """Begin an operation, as soon as there is room for it: until then the caller reads no further."""
        await self._own.acquire()
        try:
            await self._shared.acquire()
        except BaseException:
            self._own.release()
            raise
        # A callback, because a task that is cancelled before it begins executes nothing.
        self._tasks.create_task(operation()).add_done_callback(self._release)

    def _release(self, _: object) -> None:
        self._shared.release()
        self._own.release()


@asynccontextmanager
async def in_flight(shared: asyncio.Semaphore) -> AsyncGenerator[Flight, None]:
    """Run operations on pieces; the end of the block waits for all of them, and raises the first failure.

    A failure within the block does not end operations that have begun: an interrupted upload keeps what has
    arrived.

    Args:
        shared: limits the pieces that all media of the process have in flight.
    """
    interruption: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield Flight(tasks, shared)
            except Exception as error:  # noqa: BLE001 - raised below
                interruption = error
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if interruption is not None:
        raise interruption


async def in_order(
    operations: Iterable[_Operation[_Result]], shared: asyncio.Semaphore
) -> AsyncGenerator[_Result, None]:
    """Yield the operations' results in order; some run at a time."""

    async def run(operation: _Operation[_Result]) -> _Result:
        async with shared:
            return await operation()

    rest = iter(operations)
    while batch := list(islice(rest, WINDOW)):
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(operation)) for operation in batch]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for task in running:
            yield task.result()
