"""The requests that a gateway makes of lines at a time, over all its batches, and their priorities."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

LOW_PRIORITY: Final = -10
MOST_BATCHES: Final = 16
"""The batches of a tenant that a gateway runs at a time; each holds some megabytes of its file."""


class LineSlots:
    """`count` requests run at a time. Free slots go to the tenant whose last turn is longest ago.

    So tenants have turns, however many lines and batches each has. The lines of one go as they came.
    One of the running lines has the priority of usual requests, and the others a low one. So batches go on,
    slowly, while a deployment is busy, and take what is left of it otherwise.
    """

    def __init__(self, count: int) -> None:
        self._batches: dict[str | None, asyncio.Semaphore] = {}
        self._count = count
        self._free = count
        self._waiting: dict[str | None, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._turns = 0
        self._last_turns: dict[str | None, int] = {}
        self._has_usual = False

    def batches_of(self, tenant: str | None) -> asyncio.Semaphore:
        """The places for batches of a tenant that run."""
        return self._batches.setdefault(tenant, asyncio.Semaphore(MOST_BATCHES))

    @asynccontextmanager
    async def taken(
        self, requests: int, *, may_be_usual: bool, tenant: str | None = None
    ) -> AsyncGenerator[int, None]:
        """Wait for room, and hold it within the block, which gets the priority of the line.

        A line of more requests than there are slots takes all of them. One that asks for a low priority
        itself does not get the usual one, which it would keep from others.
        """
        async with self._held(min(requests, self._count), tenant):
            if self._has_usual or not may_be_usual:
                yield LOW_PRIORITY
                return
            self._has_usual = True
            try:
                yield 0
            finally:
                self._has_usual = False

    @asynccontextmanager
    async def _held(self, slots: int, tenant: str | None) -> AsyncGenerator[None, None]:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((slots, granted))
        try:
            self._grant()
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += slots
            self._grant()

    def _grant(self) -> None:
        """Give free slots to those who wait. The first of them keeps its turn until there are enough."""
        while self._waiting:
            tenant = min(self._waiting, key=lambda one: self._last_turns.get(one, 0))
            queue = self._waiting[tenant]
            slots, granted = queue[0]
            if not granted.cancelled():
                if slots > self._free:
                    return
                self._free -= slots
                self._turns += 1
                self._last_turns[tenant] = self._turns
                granted.set_result(None)
            queue.popleft()
            if not queue:
                del self._waiting[tenant]
