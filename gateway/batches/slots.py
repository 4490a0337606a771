"""The number of lines that a gateway asks for at a time, over all its batches, and their priorities."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

LOW_PRIORITY: Final = -10


class LineSlots:
    """`count` lines run at a time. Lines that wait get their slots in turn, whatever their batch.

    One of the running lines has the priority of usual requests, and the others a low one. So batches go on,
    slowly, while a deployment is busy, and take what is left of it otherwise.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._has_usual = False

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[int, None]:
        """Wait for a slot, and hold it within the block, which gets the priority of the line."""
        async with self._free:
            if self._has_usual:
                yield LOW_PRIORITY
                return
            self._has_usual = True
            try:
                yield 0
            finally:
                self._has_usual = False
