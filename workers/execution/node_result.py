"""Result of one node call on this rank, the same type for all engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.events import SequenceHandover
from workers.data_plane.port import Array
from workers.data_plane.step_tensors import Value


@dataclass(slots=True, kw_only=True)
class NodeResult:
    """The result of one node call.

    Attributes:
        outputs: by edge name, the values for the edges of this walk.
        streamed: by edge name, one item for each stream into another walk.
        facts: values that the plan reads, added to the walk's result (`WalkResult.facts`).
        stops: loops that end with this iteration.
        progress: plain values that advise the client.
        previews: by modality, arrays that advise the client.
        handover: the node's sequence, if another rank continues it; else None.
        next_rank: the rank that continues the sequence; None without a `handover`.
    """

    outputs: Mapping[str, Value]
    streamed: Mapping[str, Value] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    previews: Mapping[str, Array] = field(default_factory=dict)
    handover: SequenceHandover | None = None
    next_rank: int | None = None
