"""Settings of Python's garbage collector for processes whose state has next to no reference cycles.

Requests, events and results are trees, which reference counting frees. The collector scans them nevertheless,
and takes longer the more there are: with 10,000 answered requests in a conductor, one full collection delayed
every request by 0.2 s, and a replay spent a quarter of its time there (2026-11).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (10_000, 50, 100)
"""Young objects are scanned after 10,000 allocations; all objects almost never."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Make the collector run seldom within the block."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_all() -> None:
    """Exclude all objects from further collections: the process is about to end.

    Python's last collection of a worker's 350,000 objects takes two seconds, and longer if three ranks end at
    the same time (2026-11); the launcher would kill workers that have long finished.
    """
    gc.freeze()
