"""Threads that make an object and use it until they end."""

import asyncio
from threading import Event, current_thread

import pytest

from workers.threads.owner_thread import OwnerThread


async def test_the_object_is_made_and_used_in_the_thread() -> None:
    names: list[str] = []
    thread = OwnerThread("owner", lambda: current_thread().name, names.append)

    assert await thread.start() == thread.made == "owner"
    await thread.wait()
    await thread.join()

    assert names == ["owner"]


async def test_an_error_of_make_is_raised_by_start_and_the_thread_ends() -> None:
    thread: OwnerThread[int] = OwnerThread("owner", lambda: 1 // 0, lambda _: None)

    with pytest.raises(ZeroDivisionError):
        await thread.start()

    await thread.wait()
    assert thread.made is None


async def test_an_error_of_serve_is_reported_first_and_then_raised_by_wait() -> None:
    deaths: list[str] = []
    thread = OwnerThread(
        "owner", lambda: 0, lambda made: print(1 // made), lambda error: deaths.append(str(error))
    )
    await thread.start()

    with pytest.raises(ZeroDivisionError):
        await thread.wait()

    assert len(deaths) == 1


async def test_an_error_after_the_wait_was_cancelled_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    go_on = Event()

    def serve(_: int) -> None:
        go_on.wait()
        raise ZeroDivisionError

    thread = OwnerThread("owner", lambda: 0, serve)
    await thread.start()
    waiting = asyncio.create_task(thread.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    go_on.set()
    await thread.join()
    await asyncio.wait([waiting])
    await asyncio.sleep(0)

    assert caplog.records == []


async def test_callbacks_run_on_the_loop() -> None:
    called = asyncio.Event()
    thread = OwnerThread("owner", lambda: 0, lambda _: thread.on_loop(called.set))
    await thread.start()

    await called.wait()
