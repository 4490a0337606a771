"""Python's collector of reference cycles, told what it cannot know: our state has next to none.

Requests, events and results are trees: counting references frees them. The collector walks them all the
same, and the more are kept the longer: with 10,000 answered requests in a conductor, one full pass held
every request up for 0.2 s, and a replay spent a quarter of its time there (2026-11).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (10_000, 50, 100)
"""What is young is looked at once in 10,000 new objects; everything, as good as never."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Within the block the collector runs seldom."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_all() -> None:
    """Look for no cycles any more: the process ends, and with it all it has.

    Python's last look at a worker's 350,000 objects takes two seconds, and longer where three ranks end at a
    time (2026-11); a launcher that waits for them would kill what has long said good-bye.
    """
    gc.freeze()
