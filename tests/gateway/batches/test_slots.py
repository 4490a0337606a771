"""Slots of running lines, and their priorities."""

import asyncio
from contextlib import AsyncExitStack

from gateway.batches.slots import LOW_PRIORITY, LineSlots


async def test_one_running_line_has_the_usual_priority() -> None:
    slots = LineSlots(3)
    async with AsyncExitStack() as lines:
        found = [await lines.enter_async_context(slots.taken()) for _ in range(3)]
    async with slots.taken() as again:
        pass

    assert found == [0, LOW_PRIORITY, LOW_PRIORITY]
    assert again == 0


async def test_lines_wait_in_turn() -> None:
    slots, order = LineSlots(1), []

    async def run(name: str) -> None:
        for _ in range(3):
            async with slots.taken():
                order.append(name)
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for name in "ab":
            tasks.create_task(run(name))

    assert order == ["a", "b"] * 3
