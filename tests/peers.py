"""Ranks that share a node, as threads of one process: sums and gathers without a network."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
PATIENCE_S = 60.0


@dataclass(slots=True)
class Circle:
    """`size` members, each for its own thread; a member that waits in vain fails."""

    size: int
    barrier: Barrier = field(init=False)
    said: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=PATIENCE_S)
        self.said = [None] * self.size

    def members(self) -> list["Member"]:
        return [Member(self, index) for index in range(self.size)]


@dataclass(slots=True)
class Member:
    circle: Circle
    index: int
    sums: int = 0

    @property
    def size(self) -> int:
        return self.circle.size

    def add(self, tensor: torch.Tensor) -> None:
        self.sums += 1
        tensor.copy_(reduce(torch.add, self._all(tensor.clone())))

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(tensor), dim=-1)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.circle.said[self.index] = tensor
        self.circle.barrier.wait()
        found = [one for one in self.circle.said if one is not None]
        self.circle.barrier.wait()
        return found


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in its own thread, concurrently; return the results in order."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [one.result() for one in [pool.submit(work) for work in works]]
