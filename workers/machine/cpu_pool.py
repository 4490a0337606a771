"""Threads for CPU nodes (mostly tokenization), shared fairly by tenants, with large inputs apart.

A thread cannot be stopped: work of a dropped step continues, and keeps its slot. So a worker's next
incarnation waits for it (`idle`). Else its first requests would queue after old work, and a request in
quarantine could be blamed for a death although it never ran alone.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from workers.threads.fair_slots import FairSlots

_T = TypeVar("_T")

LARGE_CHARS: Final = 1 << 16
"""Inputs of more characters are large: they take more than some 0.1 s to tokenize."""
_MAX_WAITING: Final = 4096


class CpuPool:
    """Runs the CPU nodes of one worker, for one event loop.

    Small inputs have `threads` threads, large ones `large`, by default half as many. One tenant has at most
    half of either, so that others find one free, and a core of a small machine as well.
    """

    def __init__(self, threads: int, *, large: int | None = None) -> None:
        large = max(2, threads // 2 if large is None else large)
        self._threads = ThreadPoolExecutor(threads + large, thread_name_prefix="cpu-node")
        self._small = _slots(threads)
        self._large = _slots(large)
        self._unfinished: set[Future[Any]] = set()

    async def run(self, work: Callable[[], _T], *, tenant: str = "", is_large: bool = False) -> _T:
        """Run work in a thread when it is the tenant's turn; it never runs if the caller is cancelled before.

        Raises:
            CapacityError: too much work is waiting.
        """
        slots, loop = (self._large if is_large else self._small), asyncio.get_running_loop()
        await slots.acquire(tenant)
        begun_s = time.monotonic()
        # A future and its callbacks refer to one another, so it is collected late; it must not hold a result
        # of many megabytes.
        results: list[_T] = []
        running = self._threads.submit(lambda: results.append(work()))
        self._unfinished.add(running)

        def finish() -> None:
            self._unfinished.discard(running)
            slots.release(tenant, time.monotonic() - begun_s)

        # A wrapped future would be done when its caller is cancelled; the thread is done later.
        running.add_done_callback(lambda _: _call_on(loop, finish))
        await asyncio.wrap_future(running)
        return results.pop()

    async def idle(self) -> None:
        """Wait until all running work has ended."""
        while self._unfinished:
            await asyncio.wait([asyncio.wrap_future(one) for one in tuple(self._unfinished)])

    def close(self) -> None:
        """Take no more work, and wait for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_large(args: Mapping[str, Any]) -> bool:
    """True if the strings in plain values have more than `LARGE_CHARS` characters together."""
    chars, inside = 0, list[Any](args.values())
    while inside and chars <= LARGE_CHARS:
        part = inside.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            inside += part.values()
        elif isinstance(part, list | tuple):
            inside += part
    return chars > LARGE_CHARS


def _slots(threads: int) -> FairSlots:
    return FairSlots(
        threads,
        per_tenant=max(1, min(threads, os.cpu_count() or 1) // 2),
        max_waiting=_MAX_WAITING,
        per_tenant_waiting=_MAX_WAITING,
        what="the prompts that have to be tokenized",
        code="overloaded",
    )


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop has been closed
        call()
