"""Work that never ends is left alone; its late result harms nobody."""

import asyncio
import threading

import pytest

from workers.guides.compile_thread import in_thread


async def test_results_and_errors_reach_the_caller() -> None:
    assert await in_thread(lambda: 7, 60.0) == 7
    with pytest.raises(ValueError, match="none"):
        await in_thread(lambda: int("none"), 60.0)


async def test_work_beyond_its_limit_is_abandoned() -> None:
    released, ended = threading.Event(), threading.Event()

    def hang() -> None:
        released.wait()
        ended.set()

    with pytest.raises(TimeoutError):
        await in_thread(hang, 0.0)
    released.set()

    assert await asyncio.to_thread(ended.wait, 60)
    await asyncio.sleep(0)  # its late result finds nobody
