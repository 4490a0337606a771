"""Slots of running lines, and their priorities."""

import asyncio
from contextlib import AsyncExitStack

from gateway.batches.slots import LOW_PRIORITY, MOST_BATCHES, LineSlots


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


async def test_tenants_have_turns_however_many_lines_each_has() -> None:
    slots, order = LineSlots(1), []

    async def run(tenant: str) -> None:
        async with slots.taken(1, may_be_usual=True, tenant=tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for tenant in ["many"] * 6 + ["few"] * 2:
            tasks.create_task(run(tenant))

    assert order == ["many", "few", "many", "few", "many", "many", "many", "many"]


async def test_the_slot_of_a_cancelled_line_passes_on() -> None:
    slots, order = LineSlots(1), []

    async def run(name: str) -> None:
        async with slots.taken(1, may_be_usual=True, tenant=name):
            order.append(name)

    async with asyncio.TaskGroup() as tasks:
        async with slots.taken(1, may_be_usual=True):
            waiting, given, last = [tasks.create_task(run(name)) for name in ("waits", "given", "last")]
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
        given.cancel()  # at the moment at which it has the slot
        await last
        await run("again")

    assert order == ["last", "again"]


async def test_each_tenant_has_places_for_its_own_batches() -> None:
    slots = LineSlots(1)
    for _ in range(MOST_BATCHES):
        await slots.batches_of("many").acquire()

    assert slots.batches_of("many").locked()
    assert not slots.batches_of("few").locked()
