"""Work shared out among processes, which are forked: they inherit the records instead of being sent them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TypeVar

T = TypeVar("T")

_work: Sequence[Callable[[], Any]] = ()


def count() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(work: Sequence[Callable[[], T]], processes: int) -> list[T]:
    """Call each of `work`, `processes` at a time; return the results in order.

    An error of one is raised here. Without fork, all run in this process.
    """
    if processes == 1 or len(work) == 1 or "fork" not in get_all_start_methods():
        return [one() for one in work]
    with ProcessPoolExecutor(
        min(processes, len(work)), mp_context=get_context("fork"), initializer=_inherit, initargs=(work,)
    ) as pool:
        return list(pool.map(_call, range(len(work))))


def _inherit(work: Sequence[Callable[[], Any]]) -> None:
    global _work
    _work = work


def _call(place: int) -> Any:
    return _work[place]()
