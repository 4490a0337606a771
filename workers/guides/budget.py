"""A budget of processor time for each tenant, over a sliding window. Pure."""

from collections import deque
from collections.abc import Callable
from typing import Final

_STEPS: Final = 60
"""Time is counted in so many steps per window."""


class CpuBudget:
    """The processor time that each tenant has used in the last `window_s` seconds, and may use.

    Args:
        limit_s: the processor time of one tenant in a window, in seconds.
        clock: returns the time in seconds.
    """

    def __init__(self, limit_s: float, window_s: float, clock: Callable[[], float]) -> None:
        self.limit_s: Final = limit_s
        self.window_s: Final = window_s
        self._clock = clock
        self._spent: dict[str, deque[tuple[int, float]]] = {}

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Add processor time that was used for a tenant."""
        step = self._step()
        spent = self._spent.setdefault(tenant, deque())
        if spent and spent[-1][0] == step:
            cpu_s += spent.pop()[1]
        spent.append((step, cpu_s))
        for name in [name for name, their in self._spent.items() if their[-1][0] <= step - _STEPS]:
            del self._spent[name]

    def spent_s(self, tenant: str) -> float:
        """The processor time used for a tenant in the window that ends now."""
        oldest = self._step() - _STEPS
        return sum(cpu_s for step, cpu_s in self._spent.get(tenant, ()) if step > oldest)

    def wait_s(self, tenant: str) -> float:
        """The time until a tenant may use more; 0 if it may now."""
        left_s = self.spent_s(tenant) - self.limit_s
        if left_s < 0:
            return 0.0
        now, oldest = self._clock(), self._step() - _STEPS
        for step, cpu_s in self._spent[tenant]:
            if step > oldest:
                left_s -= cpu_s
                if left_s < 0:
                    return max(0.0, (step + _STEPS) * self.window_s / _STEPS - now)
        return self.window_s

    def _step(self) -> int:
        return int(self._clock() * _STEPS / self.window_s)
