"""The writer of one incarnation: signs and posts every event that a worker publishes.

A signature consists of the writer's name, its event count and the incarnation. The count increases only when
the log accepts an event, so a refused event leaves no gap.
"""

from collections.abc import Callable

import msgspec

from shared.errors import CapacityError
from shared.events import Event, encode
from shared.ids import Incarnation, Rank
from shared.log.port import Log
from shared.subjects import worker_writer


class EventWriter:
    """Signs and posts events for one incarnation of a rank; `incarnation` is None until it is known.

    `check` is called before each event, and raises if the worker must not say any more.
    """

    def __init__(self, log: Log, rank: Rank, check: Callable[[], None] = lambda: None) -> None:
        self.name = worker_writer(rank)
        self.incarnation: Incarnation | None = None
        self._log = log
        self._check = check
        self._number = 0

    def post(self, subject: str, event: Event, stored: Callable[[int], None] | None = None) -> None:
        """Sign and post an event; the log calls `stored` with the position of the stored record.

        Raises:
            PayloadTooLargeError: the event exceeds the size limit; nothing was posted.
            OutboxFullError: too many events wait for their acks; nothing was posted.
            LogUnavailableError: the log is closed.
            CheckpointReplacedError: what the event says was computed with other weights than were recorded.
        """
        self._check()
        signed = msgspec.structs.replace(
            event, writer=self.name, number=self._number + 1, incarnation=self.incarnation
        )
        self._log.post(subject, encode(signed), stored)
        self._number += 1

    async def post_when_possible(
        self, subject: str, event: Event, stored: Callable[[int], None] | None = None
    ) -> None:
        """Sign and post an event as soon as the outbox has room."""
        while True:
            try:
                return self.post(subject, event, stored)
            except CapacityError:
                await self._log.drain()
