"""CPU nodes share threads fairly, large inputs have their own, and idle means that all threads are done."""

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from workers.machine.cpu_pool import LARGE_CHARS, CpuPool, is_large


class Work:
    """Work that runs until the test releases it."""

    def __init__(self) -> None:
        self.begun, self.done = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.done.wait(60)
        return "done"

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 60)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_it_is_idle_when_the_last_thread_is_done_though_what_it_did_was_dropped() -> None:
    work, queued = Work(), Work()
    with CpuPool(1) as pool:
        dropped = asyncio.create_task(pool.run(work))
        waiting = asyncio.create_task(pool.run(queued))
        await work.has_begun()
        dropped.cancel()
        waiting.cancel()
        idle = asyncio.create_task(pool.idle())
        await turns()
        assert not idle.done()
        work.done.set()
        await idle
        assert not queued.begun.is_set()


async def test_a_thread_of_dropped_work_is_not_given_to_others_before_it_is_done() -> None:
    work, other = Work(), Work()
    with CpuPool(1) as pool:
        dropped = asyncio.create_task(pool.run(work))
        await work.has_begun()
        dropped.cancel()
        following = asyncio.create_task(pool.run(other))
        await turns()
        assert not other.begun.is_set()
        work.done.set()
        other.done.set()
        assert await following == "done"


async def test_large_inputs_and_other_tenants_do_not_delay_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    flood = [Work() for _ in range(6)]
    with CpuPool(4) as pool:
        running = [
            asyncio.create_task(pool.run(work, tenant="flood", is_large=number % 2 == 0))
            for number, work in enumerate(flood)
        ]
        await flood[0].has_begun()
        await flood[1].has_begun()

        assert await pool.run(lambda: "small", tenant="other") == "small"
        assert await pool.run(lambda: "large", tenant="other", is_large=True) == "large"

        assert [work.begun.is_set() for work in flood] == [True, True, False, False, False, False]
        for work in flood:
            work.done.set()
        assert [await task for task in running] == ["done"] * 6


async def test_a_failure_is_nobodys_business_here() -> None:
    with CpuPool(1) as pool:
        failed = asyncio.create_task(pool.run(lambda: int("none")))
        await pool.idle()
        with pytest.raises(ValueError, match="none"):
            await failed


@pytest.mark.parametrize(
    ("args", "large"),
    [
        ({}, False),
        ({"inputs": {"text": "x" * LARGE_CHARS}}, False),
        ({"inputs": {"text": "x" * LARGE_CHARS}, "params": {"stop": ["y"]}}, True),
        ({"inputs": {"messages": [{"content": "x" * 1000}] * 70}}, True),
        ({"inputs": {"token_ids": [1] * 100_000}}, False),
    ],
)
def test_inputs_are_large_by_all_their_texts_together(args: dict[str, Any], *, large: bool) -> None:
    assert is_large(args) == large


async def test_the_pool_holds_no_result_that_its_caller_has_dropped() -> None:
    class Large:
        """An array of many megabytes."""

    gc.disable()
    try:
        with CpuPool(2) as pool:
            result = await pool.run(Large)
            remembered = weakref.ref(result)
            del result
            await pool.idle()
            assert remembered() is None
    finally:
        gc.enable()


async def test_large_inputs_have_as_many_threads_as_there_are_decoders() -> None:
    works = [Work() for _ in range(3)]
    with CpuPool(1, large=3) as pool:
        async with asyncio.TaskGroup() as tasks:
            for tenant, work in zip("abc", works, strict=True):
                tasks.create_task(pool.run(work, tenant=tenant, is_large=True))
            for work in works:
                await work.has_begun()
            for work in works:
                work.done.set()
