"""Clients that ask at the same time, and time that is measured in named parts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


def together(clients: int, ask: Callable[[int], list[float]]) -> tuple[float, list[float]]:
    """Let clients ask at the same time.

    Args:
        clients: their number.
        ask: asks as the client of this number; returns the seconds of each of its requests.

    Returns:
        requests per second of all of them together, and the seconds of each request.
    """
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds = [one for found in pool.map(ask, range(clients)) for one in found]
    return len(seconds) / (time.perf_counter() - begun_s), seconds


@dataclass(slots=True)
class Parts:
    """Seconds of the parts of a computation, by name; of a GPU with all that was launched."""

    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        begun_s = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.setdefault(part, []).append(time.perf_counter() - begun_s)

    def share(self, part: str, whole: str) -> float:
        """The share of a part in another one."""
        return sum(self.seconds[part]) / sum(self.seconds[whole])
