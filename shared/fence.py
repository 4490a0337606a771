"""The epoch fence: which conductor's events count.

Every reader folds the log through one of these, in log order. A conductor's event of a lower epoch
stored behind a higher `epoch.opened` is void: its writer was deposed and did not know it.
"""

from dataclasses import dataclass

from shared.events import AnyEvent, EpochOpened, Event
from shared.subjects import CONDUCTOR_WRITER


@dataclass(slots=True)
class EpochFence:
    """`epoch` is the highest opened so far; 0 when none is known."""

    epoch: int = 0

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
