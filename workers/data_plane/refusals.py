"""Counter of invalid input that no worker of ours sends; logs the 1st, 2nd, 4th, 8th, ... occurrence."""

import logging
import threading

_LOGGER = logging.getLogger(__name__)


class Refusals:
    """The number of refusals; thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, why: str) -> None:
        with self._lock:
            self.count += 1
            count = self.count
        if count & (count - 1) == 0:
            _LOGGER.warning("data plane: refused (%d so far): %s", count, why)
