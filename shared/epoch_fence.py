"""The epoch fence: it voids events of deposed conductors.

A reader that acts on the events of conductors folds the log through an `EpochFence`, in log order. A
conductor's event of a lower epoch that is stored after a higher `epoch.opened` is void: its writer had been
deposed. (The event `output.fence` is something else: it voids output chunks of a request's earlier attempts,
see `shared.transcript`.)
"""

from contextlib import aclosing, suppress
from dataclasses import dataclass

from shared.events import AnyEvent, EpochOpened, Event, MalformedEventError, decode
from shared.log.port import Log, StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects


@dataclass(slots=True)
class EpochFence:
    """The fold. `epoch` is the highest epoch opened so far; 0 if none is known."""

    epoch: int = 0

    @classmethod
    async def read(cls, log: Log, subjects: Subjects) -> "EpochFence":
        """Return the fence for events after the log's present end.

        The newest record on the epochs' subject has the epoch in force, unless it is no event: a key that may
        read can have the server store a reply there (ADR 11). Then all records of the subject are read.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        fence = cls()
        newest = await log.last(subjects.epoch)
        if newest is None or fence._opens(newest):
            return fence
        async with aclosing(log.history([subjects.epoch], 1, newest.seq)) as records:
            async for record in records:
                fence._opens(record)
        return fence

    def admits(self, event: AnyEvent) -> bool:
        """Fold one event, and return whether it is valid."""
        if isinstance(event, EpochOpened):
            opened = event.epoch or 0
            if opened <= self.epoch:
                return False
            self.epoch = opened
            return True
        return not self._is_deposed(event)

    def _opens(self, record: StoredRecord) -> bool:
        """Fold a record of the epochs' subject; return whether it opens an epoch."""
        with suppress(MalformedEventError):
            event = decode(record.data)
            return isinstance(event, EpochOpened) and self.admits(event)
        return False

    def _is_deposed(self, event: Event) -> bool:
        return event.writer == CONDUCTOR_WRITER and (event.epoch or 0) < self.epoch
