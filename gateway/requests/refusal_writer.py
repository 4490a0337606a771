"""Stores what `gateway.requests.refusals` counts in the log: one event at a time, at most every `INTERVAL_S`.

An event is written over a connection of its own, which is opened for it. So nothing that prevents it (no
permission for the subject, a stream that lacks it) touches the events of requests. An event that could not be
stored is kept and sent again under the same id: readers count the first copy of an id. Meanwhile the tally
goes on counting, so that a log that was away lacks nothing afterwards. What was counted since the last event
is lost with a gateway that is killed.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Final, TypeAlias

from gateway.requests.refusals import RefusalTally
from shared.errors import DalSegnoError
from shared.events import Refusal, RequestsRefused, encode
from shared.log.port import Log
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)
DELAY_S: Final = 1.0
"""The time from the first refusal to its event, so that a burst is one event."""
INTERVAL_S: Final = 10.0
"""The shortest time between the beginnings of two events."""
WRITE_S: Final = 5.0
"""The time limit of one attempt to store an event."""

OpenLog: TypeAlias = Callable[[], AbstractAsyncContextManager[Log]]
"""Opens a log for one event, or raises a `DalSegnoError` while it has no room for it."""


class RefusalWriter:
    """The refusals of one gateway, named `origin`."""

    def __init__(self, subjects: Subjects, origin: str) -> None:
        self._subject = subjects.refused(origin)
        self._origin = origin
        self._tally = RefusalTally()
        self._pending: RequestsRefused | None = None
        self._numbers = count(1)
        self._news = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._warned = ""

    def add(self, refusal: Refusal) -> None:
        """Count a refusal."""
        self._tally.add(refusal)
        self._news.set()

    async def run(self, open_log: OpenLog) -> None:
        """Store events while there is something to say, until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(DELAY_S)
            await self.write(open_log)
            await asyncio.sleep(INTERVAL_S - DELAY_S)

    async def finish(self, open_log: OpenLog, deadline_s: float) -> None:
        """Store what is left when the gateway ends, if that is possible in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._news.is_set() and await self.write(open_log):
                    pass
        except TimeoutError:
            _LOGGER.warning("the last refused requests are not recorded: the log did not answer in time")

    async def write(self, open_log: OpenLog) -> bool:
        """Store one event about what was refused, if anything was; False if it has to be tried again."""
        async with self._one_at_a_time:
            self._pending = self._pending or self._tally.take(
                f"{self._origin}.refused.{next(self._numbers)}", self._origin
            )
            if self._pending is not None and not await self._is_stored(self._pending, open_log):
                return False
            self._pending = None
            if not self._tally:
                self._news.clear()
            return True

    async def _is_stored(self, event: RequestsRefused, open_log: OpenLog) -> bool:
        try:
            async with asyncio.timeout(WRITE_S), open_log() as log:
                await log.publish(self._subject, encode(event), waits_while_full=False)
        except TimeoutError:
            self._warn(f"the log did not answer within {WRITE_S:g} s")
        except DalSegnoError as error:
            self._warn(error.message)
        else:
            self._warned = ""
            return True
        return False

    def _warn(self, reason: str) -> None:
        if reason != self._warned:  # once per reason, not at every attempt
            self._warned = reason
            _LOGGER.warning("refused requests cannot be recorded now, and are counted until then: %s", reason)
