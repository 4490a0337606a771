"""The speed of runs that report their steps, and the time that remains. Pure: the time is given to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class StepRate:
    """The speed of one run since its first report.

    Attributes:
        step: of the first report.
        at_s: when it was made.
    """

    step: int
    at_s: float

    def of(self, step: int, steps: int, now_s: float) -> dict[str, float]:
        """The steps per second, and the seconds that remain; nothing before a second step is reported."""
        done, took_s = step - self.step, now_s - self.at_s
        if done <= 0 or took_s <= 0:
            return {}
        rate = done / took_s
        return {"steps_per_s": round(rate, 3), "remaining_s": round(max(0, steps - step) / rate, 1)}


class StepRates:
    """The speeds of the nodes of one step of a plan."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}

    def timed(self, node: str, progress: Mapping[str, Any], now_s: float) -> dict[str, Any]:
        """The progress of a node, with `steps_per_s` and `remaining_s` if it counts steps."""
        match progress:
            case {"step": int(step), "steps": int(steps)}:
                rate = self._rates.get(node)
                if rate is None or step <= rate.step:  # the first report, or another run of the node
                    rate = self._rates[node] = StepRate(step, now_s)
                return {**progress, **rate.of(step, steps, now_s)}
            case _:
                return dict(progress)
