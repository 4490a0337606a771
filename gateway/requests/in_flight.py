"""The answers that a gateway gives now, so that a shutdown can wait for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class InFlightAnswers:
    """The answers in progress; `count` is their number."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count one answer within the block."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def wait_until_idle(self, deadline_s: float) -> bool:
        """Wait until there are none; False if that took longer than `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
