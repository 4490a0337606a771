"""Detection of repeated signals: a second signal is distinguished from the echo of the first.

`timeout` and some terminals send a signal to a process and to its group, so that it arrives twice. A signal
within half a second of the first is its echo.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

ECHO_S: Final = 0.5


@dataclass(slots=True)
class SignalEcho:
    """Recognises echoes of the first signal."""

    now: Callable[[], float] = monotonic
    _first_s: float | None = None

    def is_echo(self) -> bool:
        """Register one signal; True if it is an echo."""
        if self._first_s is None:
            self._first_s = self.now()
            return False
        return self.now() - self._first_s < ECHO_S
