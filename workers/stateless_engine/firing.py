"""Firings (executions of a stateless node) and their results, with bytes instead of tensors. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.base import ChunkOf
from shared.tensors import Handle
from workers.data_plane.port import Array, DeviceArray, PublishOnDevice
from workers.threads.engine_work import EngineWork


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessFiring:
    """One execution of a node; the attributes are those of `models.base.Item`.

    Attributes:
        publish: by edge, publishes an output from GPU memory for other ranks.
        state: for a stepped node: the checkpoint of an interrupted run, by name; empty for none.
        work: the record of its work in the engine.
    """

    node: str
    inputs: Mapping[str, Array | DeviceArray]
    args: Mapping[str, Any]
    seed: int
    path: tuple[int, ...]
    chunk: ChunkOf | None
    publish: Mapping[str, PublishOnDevice] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    work: EngineWork = field(default_factory=EngineWork, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringReport:
    """A report of a stepped run that goes on (`models.programs.Going`); all arrays are in main memory.

    Attributes:
        progress: plain values for the client.
        previews: by modality.
        state: a checkpoint of the run, by name; empty for none.
    """

    progress: Mapping[str, Any]
    previews: Mapping[str, Array]
    state: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class FiringResult:
    """The result of a firing: outputs by edge, facts for the plan, and the loops that it ends.

    An output is a handle where it was published from GPU memory. `progress` and `previews` (by modality) are
    advice for the client.
    """

    outputs: Mapping[str, Array | Handle]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    previews: Mapping[str, Array] = field(default_factory=dict)


@dataclass(slots=True)
class StatelessStats:
    """Work done since the engine was made; its thread writes the fields while other threads read them.

    Attributes:
        waiting: queued firings.
        batches: executed batches.
        firings, failed: executed firings, those of stepped nodes included, and those of them that failed.
        busy_s: the total duration of the batches, and of the forwards of stepped nodes.
    """

    waiting: int = 0
    batches: int = 0
    firings: int = 0
    failed: int = 0
    busy_s: float = 0.0
