"""Threads for the nodes that run on the CPU, of which it is known when they are done."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CpuPool(ThreadPoolExecutor):
    """A thread cannot be stopped: what a step ran there goes on when the step is dropped.

    So a worker's next life waits for it: else its first requests stand behind work of the life before, and
    one that is on probation is taken for what kills the worker, though it never had it to itself.
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
        """Wait until nothing runs any more."""
        while self._unfinished:
            await asyncio.wait([asyncio.wrap_future(one) for one in tuple(self._unfinished)])
