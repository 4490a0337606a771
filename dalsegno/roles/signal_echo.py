"""Being told to stop, and being told twice: the second time is meant.

`timeout` and some terminals send their signal to a process and to its whole group, so that it comes twice
for one wish. What comes within half a second of the first is its echo.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

ECHO_S: Final = 0.5


@dataclass(slots=True)
class SignalEcho:
    """Tells a signal from the echo of the first one."""

    now: Callable[[], float] = monotonic
    _first_s: float | None = None

    def heard(self) -> bool:
        """Take one signal; whether it is an echo."""
        if self._first_s is None:
            self._first_s = self.now()
            return False
        return self.now() - self._first_s < ECHO_S
