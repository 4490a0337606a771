"""Slots of running lines, and their priorities."""

import asyncio
from contextlib import AsyncExitStack

from gateway.batches.slots import LOW_PRIORITY, LineSlots


async def test_one_running_line_has_the_usual_priority() -> None:
    slots = LineSlots(3)
    async with AsyncExitStack() as lines:
        found = [await lines.enter_async_context(slots.taken(1, may_be_usual=True)) for _ in range(3)]
    async with slots.taken(1, may_be_usual=True) as again:
        pass

    assert found == [0, LOW_PRIORITY, LOW_PRIORITY]
    assert again == 0


async def test_lines_wait_in_turn() -> None:
    slots, order = LineSlots(1), []

    async def run(name: str) -> None:
        for _ in range(3):
            async with slots.taken(1, may_be_usual=True):
                order.append(name)
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for name in "ab":
            tasks.create_task(run(name))

    assert order == ["a", "b"] * 3


async def test_a_line_of_many_requests_takes_their_slots_and_at_most_all() -> None:
    slots = LineSlots(3)
    begun = asyncio.Event()

    async def run() -> None:
        async with slots.taken(1, may_be_usual=True):
            begun.set()

    async with asyncio.TaskGroup() as tasks, slots.taken(128, may_be_usual=True):
        tasks.create_task(run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not begun.is_set()

    assert begun.is_set()


async def test_a_line_that_asks_for_less_does_not_keep_the_usual_priority_from_others() -> None:
    slots = LineSlots(2)
    async with slots.taken(1, may_be_usual=False) as low, slots.taken(1, may_be_usual=True) as usual:
        pass

    assert (low, usual) == (LOW_PRIORITY, 0)
