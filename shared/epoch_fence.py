"""The epoch fence: it voids events of deposed conductors.

A reader that acts on the events of conductors folds the log through an `EpochFence`, in log order. A
conductor's event of a lower epoch that is stored after a higher `epoch.opened` is void: its writer had been
deposed. (The event `output.fence` is something else: it voids output chunks of a request's earlier attempts,
see `shared.transcript`.)
"""

from contextlib import suppress
from dataclasses import dataclass

from shared.events import AnyEvent, EpochOpened, Event, MalformedEventError, decode
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER


@dataclass(slots=True)
class EpochFence:
    """The fold. `epoch` is the highest epoch opened so far; 0 if none is known."""

    epoch: int = 0

    @classmethod
    def after(cls, last: StoredRecord | None) -> "EpochFence":
        """Return the fence for events after `last`, the newest record on the epochs' subject, if any."""
        fence = cls()
        if last is not None:
            with suppress(MalformedEventError):
                fence.admits(decode(last.data))
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

    def _is_deposed(self, event: Event) -> bool:
        return event.writer == CONDUCTOR_WRITER and (event.epoch or 0) < self.epoch
