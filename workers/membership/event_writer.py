"""The pen of one life: every event a worker writes goes through here.

It signs (writer, the writer's own count, incarnation) and posts. The count goes up only when the log has
taken an event over, so a refused one leaves no hole.
"""

from collections.abc import Callable

import msgspec

from shared.errors import CapacityError
from shared.events import Event, encode
from shared.ids import Incarnation, Rank
from shared.log.port import Log
from shared.subjects import worker_writer


class EventWriter:
    """Signs and posts for one life of a rank; `incarnation` is None until the life knows it."""

    def __init__(self, log: Log, rank: Rank) -> None:
        self.name = worker_writer(rank)
        self.incarnation: Incarnation | None = None
        self._log = log
        self._number = 0

    def post(self, subject: str, event: Event, stored: Callable[[int], None] | None = None) -> None:
        """Sign and post; `stored` is called with the position once the log has it.

        Raises:
            PayloadTooLargeError: it will never fit; nothing was posted.
            OutboxFullError: too much is posted already; nothing was posted.
            LogUnavailableError: the log is closed.
        """
        signed = msgspec.structs.replace(
            event, writer=self.name, number=self._number + 1, incarnation=self.incarnation
        )
        self._log.post(subject, encode(signed), stored)
        self._number += 1

    async def post_when_possible(
        self, subject: str, event: Event, stored: Callable[[int], None] | None = None
    ) -> None:
        """Sign and post, as soon as the backlog has room."""
        while True:
            try:
                return self.post(subject, event, stored)
            except CapacityError:
                await self._log.drain()
