"""The epoch fence: which conductor's events count.

Every reader folds the log through one of these, in log order. A conductor's event of a lower epoch
stored behind a higher `epoch.opened` is void: its writer was deposed and did not know it.
"""

from contextlib import suppress
from dataclasses import dataclass

from shared.events import AnyEvent, EpochOpened, Event, MalformedEventError, decode
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER


@dataclass(slots=True)
class EpochFence:
    """`epoch` is the highest opened so far; 0 when none is known."""

    epoch: int = 0

    @classmethod
    def behind(cls, last: StoredRecord | None) -> "EpochFence":
        """The fence for what follows the newest record on the epochs' subject, where there is one."""
        fence = cls()
        if last is not None:
            with suppress(MalformedEventError):
                fence.admits(decode(last.data))
        return fence

    def admits(self, event: AnyEvent) -> bool:
        """Fold one event; whether it counts."""
        if isinstance(event, EpochOpened):
            opened = event.epoch or 0
            if opened <= self.epoch:
                return False
            self.epoch = opened
            return True
        return not self._is_deposed(event)

    def _is_deposed(self, event: Event) -> bool:
        return event.writer == CONDUCTOR_WRITER and (event.epoch or 0) < self.epoch
