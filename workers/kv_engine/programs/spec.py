"""Calls of programs for the engine. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.data_plane.port import Array, DeviceArray
from workers.threads.engine_work import EngineWork


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """A call of a program.

    Attributes:
        key: the caller's name for the run; unique among the live runs and sequences.
        program: the name of the program in the node.
        node: the name of the node, where a rank has several KV nodes.
        inputs: the inputs of the node call, by edge.
        args: the arguments of the walk.
        seed: of the request.
        priority: runs with a higher one start first.
        tenant: counted as served with the tokens of its passes.
        state: the checkpoint after which it goes on (`models.programs.Going.state`); empty: it begins.
        work: the record of its work in the engine.
    """

    key: str
    program: str
    inputs: Mapping[str, Array | DeviceArray]
    args: Mapping[str, Any]
    seed: int
    priority: int = 0
    tenant: str = ""
    node: str = ""
    state: Mapping[str, Array] = field(default_factory=dict)
    work: EngineWork = field(default_factory=EngineWork, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The call of the next iteration of a loop, for the run of the iteration before.

    Attributes:
        key: of the run, which waits after a `models.programs.Turn`.
        node: as in `ProgramSpec`.
        inputs: the inputs of the node call, by edge.
    """

    key: str
    node: str
    inputs: Mapping[str, Array | DeviceArray]
