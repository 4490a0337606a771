"""Threads for CPU nodes, with a way to wait until all their work has ended."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CpuPool(ThreadPoolExecutor):
    """A thread pool that knows its unfinished work.

    A thread cannot be stopped: work of a dropped step continues. So a worker's next incarnation waits for it.
    Else its first requests would queue after old work, and a request in quarantine could be blamed for a
    death although it never ran alone.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="cpu-node")
        self._unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future = super().submit(fn, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    async def idle(self) -> None:
        """Wait until all submitted work has ended."""
        while self._unfinished:
            await asyncio.wait([asyncio.wrap_future(one) for one in tuple(self._unfinished)])
