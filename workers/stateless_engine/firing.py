"""What a firing of a stateless node is given, and what it came to: bytes, not tensors. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.base import ChunkOf
from workers.data_plane.port import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """One firing; the attributes are those of `models.base.Item`."""

    node: str
    inputs: Mapping[str, Array]
    args: Mapping[str, Any]
    seed: int
    path: tuple[int, ...]
    chunk: ChunkOf | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringResult:
    """What a firing came to: outputs by edge, facts for the plan, and loops that end with this iteration."""

    outputs: Mapping[str, Array]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()


@dataclass(slots=True)
class StatelessStats:
    """What the engine has done since it was made; counted in its thread and read beside it.

    Attributes:
        waiting: firings that are there and not taken yet.
        batches, firings, failed: calls of nodes, the firings in them, and those of them that failed.
        busy_s: how long nodes took.
    """

    waiting: int = 0
    batches: int = 0
    firings: int = 0
    failed: int = 0
    busy_s: float = 0.0
