"""Work in a thread that may never end: it is left alone after a time limit, and nothing waits for it."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

_T = TypeVar("_T")

_LOWEST_PRIORITY: Final = 19
"""The operating system's lowest priority (nice value)."""


async def in_thread(work: Callable[[], _T], limit_s: float) -> _T:
    """Run blocking work in a thread of its own, which is no reason for the process to stay.

    Raises:
        TimeoutError: it took longer than `limit_s` seconds. The thread continues with the lowest priority.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        if not result.done():
            settle()

    def run() -> None:
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            failure = error
            settle: Callable[[], None] = lambda: result.set_exception(failure)  # noqa: E731
        else:
            settle = lambda: result.set_result(made)  # noqa: E731
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(finish, settle)

    thread = threading.Thread(target=run, name="guide-check", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        if sys.platform == "linux" and thread.native_id is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread.native_id, _LOWEST_PRIORITY)
        raise
