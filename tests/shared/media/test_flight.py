"""Pieces in flight are bounded, and a failure or a cancellation gives their places back."""

import asyncio

import pytest

from shared.media.flight import WINDOW, in_flight, in_order


async def test_no_more_than_the_shared_number_of_pieces_is_in_flight() -> None:
    running = most = 0

    async def operation() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    shared = asyncio.Semaphore(3)

    async def medium() -> None:
        async with in_flight(shared) as flight:
            for _ in range(20):
                await flight.start(operation)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(medium())
    assert most == 3


async def test_the_first_failure_ends_the_others_and_gives_their_places_back() -> None:
    shared = asyncio.Semaphore(WINDOW)
    never = asyncio.Event()

    async def fails() -> None:
        raise ConnectionError("gone")

    async def waits() -> None:
        await never.wait()

    async def medium() -> None:
        async with in_flight(shared) as flight:
            for operation in (waits, fails, waits):
                await flight.start(operation)
            await never.wait()

    with pytest.raises(ConnectionError, match="gone"):
        await medium()
    for _ in range(WINDOW):
        assert not shared.locked()
        await shared.acquire()


async def test_an_interruption_lets_what_has_begun_end() -> None:
    ended = []

    async def operation() -> None:
        await asyncio.sleep(0)
        ended.append(1)

    async def medium() -> None:
        async with in_flight(asyncio.Semaphore(4)) as flight:
            await flight.start(operation)
            await flight.start(operation)
            raise ValueError("the client")

    with pytest.raises(ValueError, match="the client"):
        await medium()
    assert len(ended) == 2


async def test_results_come_in_order_whichever_ends_first() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def operation(number: int) -> int:
        if number:
            gates[number - 1].set()
        else:
            await gates[0].wait()
        return number

    operations = [lambda number=number: operation(number) for number in range(3)]
    assert [one async for one in in_order(operations, asyncio.Semaphore(3))] == [0, 1, 2]
