"""Who waits for the pool waits for what runs there, also where nobody wants it any more."""

import asyncio
import threading

import pytest

from workers.machine.cpu_pool import CpuPool


async def test_it_is_idle_when_the_last_thread_is_done_though_what_it_did_was_dropped() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        done.wait()

    with CpuPool(1) as pool:
        dropped = asyncio.get_running_loop().run_in_executor(pool, work)
        queued = asyncio.get_running_loop().run_in_executor(pool, work)
        await asyncio.to_thread(begun.wait)
        dropped.cancel()
        queued.cancel()
        idle = asyncio.create_task(pool.idle())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not idle.done()
        done.set()
        await idle


async def test_a_failure_is_nobodys_business_here() -> None:
    with CpuPool(1) as pool:
        failed = asyncio.get_running_loop().run_in_executor(pool, int, "none")
        await pool.idle()
        with pytest.raises(ValueError, match="none"):
            await failed
