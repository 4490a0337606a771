"""What a firing on this rank came to: what the engines' sides tell the walk, whichever engine it was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.events import SequenceHandover
from workers.data_plane.step_tensors import Value


@dataclass(slots=True, kw_only=True)
class NodeResult:
    """What one firing came to.

    Attributes:
        outputs: what it sends on the walk's edges, by name.
        streamed: what it sends into other walks, by name: one item each.
        facts: for the walk's result.
        stops: loops that end with this iteration.
        row: the node's row, where that goes on at the rank `to`.
    """

    outputs: Mapping[str, Value]
    streamed: Mapping[str, Value] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    row: SequenceHandover | None = None
    to: int | None = None
