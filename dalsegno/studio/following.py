"""New records of a running deployment, for pages that are open: which requests have changed.

One reader of the log serves all pages. News are collected for a quarter of a second, so that a page is told
of a hundred chunks at once. A page that does not listen misses news; its next ones name the position.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from shared.errors import DalSegnoError
from shared.log.port import Log
from shared.subjects import Subjects

_COLLECTED_S: Final = 0.25
_NAMED: Final = 200
"""Requests that are named in one piece of news."""


@dataclass(slots=True)
class Follower:
    """Reads new records from when `follow` runs; `news` may be iterated by any number of pages."""

    log: Log
    subjects: Subjects
    _changed: dict[str, None] = field(default_factory=dict)
    _last_seq: int = 0
    _latest: dict[str, Any] = field(default_factory=dict)
    _told: asyncio.Condition = field(default_factory=asyncio.Condition)
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _count: int = 0

    async def follow(self) -> None:
        """Read until cancelled, or until the log cannot be read any more: the pages are told."""
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell())
            try:
                state = await self.log.state()
                async with aclosing(self.log.read(self.subjects.logged(), state.last_seq + 1)) as records:
                    async for record in records:
                        address = self.subjects.parse(record.subject)
                        self._last_seq = record.seq
                        if address is not None and address.request_id is not None:
                            self._changed[str(address.request_id)] = None
                        self._due.set()
            except DalSegnoError as error:
                await self._say({"error": error.message})
            finally:
                telling.cancel()

    async def news(self) -> AsyncGenerator[dict[str, Any], None]:
        """Iterate over news: `seq` is the newest position, `requests` are those with new records."""
        seen = self._count
        yield {"seq": self._last_seq, "requests": []}
        while True:
            async with self._told:
                await self._told.wait_for(lambda: self._count != seen)  # noqa: B023 # waited for here
                seen, latest = self._count, self._latest
            yield latest

    async def _tell(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(_COLLECTED_S)
            self._due.clear()
            changed, self._changed = list(self._changed), {}
            await self._say({"seq": self._last_seq, "requests": changed[:_NAMED]})

    async def _say(self, news: dict[str, Any]) -> None:
        async with self._told:
            self._latest, self._count = news, self._count + 1
            self._told.notify_all()
