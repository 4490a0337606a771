"""Slots are shared fairly by tenants, callers that are cancelled leave, and full queues refuse by name."""

import asyncio

import pytest

from shared.errors import CapacityError
from workers.threads.fair_slots import FairSlots


def slots_of(
    slots: int = 1, *, per_tenant: int = 1, max_waiting: int = 100, per_tenant_waiting: int = 100
) -> FairSlots:
    return FairSlots(
        slots,
        per_tenant=per_tenant,
        max_waiting=max_waiting,
        per_tenant_waiting=per_tenant_waiting,
        what="the work",
        code="full",
    )


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Callers that wait for slots, and the order in which they get them."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.served: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, *tenants: str) -> None:
        for tenant in tenants:
            self.tasks.append(asyncio.create_task(self._wait(tenant)))
            await turns()

    async def _wait(self, tenant: str) -> None:
        await self.slots.acquire(tenant)
        self.served.append(tenant)

    async def release(self, tenant: str, used_s: float = 1.0) -> None:
        self.slots.release(tenant, used_s)
        await turns()


async def test_a_slot_goes_to_the_tenant_that_used_the_least() -> None:
    crowd = Crowd(slots_of())
    await crowd.come("flood", "flood", "flood", "flood", "other")
    assert crowd.served == ["flood"]

    await crowd.release("flood")
    assert crowd.served == ["flood", "other"]
    await crowd.release("other", 5.0)
    await crowd.release("flood")
    await crowd.release("flood")

    assert crowd.served == ["flood", "other", "flood", "flood", "flood"]
    assert not crowd.slots.waiting


async def test_an_expensive_caller_counts_by_its_time_and_not_by_its_number() -> None:
    crowd = Crowd(slots_of())
    await crowd.come("a", "b", "a", "b", "b")
    await crowd.release("a", 2.5)

    await crowd.release("b", 1.0)
    await crowd.release("b", 1.0)
    await crowd.release("b", 1.0)

    assert crowd.served == ["a", "b", "b", "b", "a"]


async def test_a_tenant_leaves_slots_for_others() -> None:
    crowd = Crowd(slots_of(3, per_tenant=2))
    await crowd.come("flood", "flood", "flood")
    assert (crowd.served, crowd.slots.waiting) == (["flood"] * 2, 1)

    await crowd.come("other")

    assert crowd.served == ["flood", "flood", "other"]


async def test_a_cancelled_caller_leaves_the_queue_and_a_slot_given_meanwhile_goes_on() -> None:
    crowd = Crowd(slots_of())
    await crowd.come("a", "b", "c", "d")
    crowd.tasks[1].cancel()
    await turns()
    assert crowd.slots.waiting == 2

    crowd.slots.release("a", 0.0)  # the slot is given to c, which is cancelled before it learns of it
    crowd.tasks[2].cancel()
    await turns()

    assert crowd.served == ["a", "d"]
    await crowd.release("d")
    await crowd.come("e")
    assert crowd.served[-1] == "e"


async def test_a_tenant_with_too_many_waiting_callers_is_refused() -> None:
    crowd = Crowd(slots_of(per_tenant_waiting=2))
    await crowd.come("a", "a", "a")

    with pytest.raises(CapacityError, match=r"^the work: 2 of this key are waiting already; try") as caught:
        await crowd.slots.acquire("a")

    assert (caught.value.code, caught.value.status) == ("full", 429)
    await crowd.come("b")
    assert crowd.slots.waiting == 3


async def test_when_all_together_are_too_many_the_longest_queue_is_cut() -> None:
    crowd = Crowd(slots_of(max_waiting=3))
    await crowd.come("flood", "flood", "flood", "flood")

    await crowd.come("other")

    assert crowd.slots.waiting == 3
    with pytest.raises(CapacityError, match=r"^the work: 3 are waiting already") as caught:
        await crowd.tasks[3]
    assert caught.value.status == 503
    await crowd.release("flood")
    assert crowd.served == ["flood", "other"]
    await crowd.come("flood", "flood")
    with pytest.raises(CapacityError, match=r"3 are waiting"):
        await crowd.tasks[-1]
