"""The requests that a gateway makes of lines at a time, over all its batches, and their priorities."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

LOW_PRIORITY: Final = -10
MOST_BATCHES: Final = 16
"""The batches of a gateway that run at a time. Each holds some megabytes of its file; the others wait."""


class LineSlots:
    """`count` requests run at a time. Lines that wait get their slots in turn, whatever their batch.

    One of the running lines has the priority of usual requests, and the others a low one. So batches go on,
    slowly, while a deployment is busy, and take what is left of it otherwise.

    Attributes:
        batches: a slot for each batch that runs.
    """

    def __init__(self, count: int) -> None:
        self.batches = asyncio.Semaphore(MOST_BATCHES)
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._turn = asyncio.Lock()
        self._has_usual = False

    @asynccontextmanager
    async def taken(self, requests: int, *, may_be_usual: bool) -> AsyncGenerator[int, None]:
        """Wait for room, and hold it within the block, which gets the priority of the line.

        A line of more requests than there are slots takes all of them. One that asks for a low priority
        itself does not get the usual one, which it would keep from others.
        """
        needed = min(requests, self._count)
        held = 0
        try:
            async with self._turn:  # the line whose turn it is gets the next free slots
                while held < needed:
                    await self._free.acquire()
                    held += 1
            if self._has_usual or not may_be_usual:
                yield LOW_PRIORITY
                return
            self._has_usual = True
            try:
                yield 0
            finally:
                self._has_usual = False
        finally:
            for _ in range(held):
                self._free.release()
