"""A compiled walk: the resolved form of a valid walk.

`shared.walks.compiler` computes it once. It is immutable, and all runs of the walk share it. Nodes and loops
have indices, in the order in which they were written. The walk itself is loop 0, which runs once.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from shared.walks.errors import WalkError
from shared.walks.language import (
    Destination,
    Guard,
    Section,
    StreamingEdge,
    check_max_iters,
    describe,
)

UNLIMITED: Final = sys.maxsize
"""The number of iterations of a loop that runs until it is stopped."""

InputPort: TypeAlias = tuple[str, str]
"""One input of one node: the names of the edge and of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A resolved edge.

    Attributes:
        holds: the loops that hold the value until they end, innermost first; True if they accumulate it.
        loop: the loop in whose iteration the value arrives.
        back: the value is for that loop's next iteration.
        when: the condition under which the edge sends.
        keeps_released: the value that an earlier attempt released stands (`Edge.on_resume` is `"keep"`).
    """

    index: int
    edge: str
    source: str
    to: Destination
    holds: tuple[tuple[int, bool], ...]
    loop: int
    back: bool
    when: Guard | None
    keeps_released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledNode:
    """A resolved node.

    Attributes:
        loop: the innermost enclosing loop.
        inputs: the inputs that are values.
        streams: the inputs that are streams.
        optional: the inputs that may be missing.
        input_count: the number of all inputs.
        outputs: the names that it must produce.
        routes: the resolved edges of its outputs.
        streaming: the edges into other walks; the rank that runs the node sends their items. The node need
            not produce a name that only these edges have.
    """

    index: int
    name: str
    loop: int
    inputs: tuple[str, ...]
    streams: tuple[str, ...]
    optional: frozenset[str]
    input_count: int
    outputs: frozenset[str]
    routes: tuple[Route, ...]
    streaming: tuple[StreamingEdge, ...]

    @property
    def streamed(self) -> frozenset[str]:
        """The names that only streaming edges have, which the node need not produce."""
        return frozenset(edge.name for edge in self.streaming) - self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLoop:
    """A resolved loop.

    Attributes:
        parent: the enclosing loop.
        lineage: the enclosing loops without the walk, outermost first, and the loop itself.
        steps: the number of nodes and loops directly in its body, which make up one iteration.
        nodes: all nodes inside, at any depth.
        inner: all loops inside, at any depth.
        resident: the body is a single node, so an engine may keep the sequence until a stop.
        external_inputs: inputs that nothing inside feeds; they are equal in every iteration.
        external_outputs: the edges that leave the loop.
        loop_back: inputs that one iteration feeds to the next.
        cleared: inputs that every iteration waits for again.
        restored: inputs that inner loops overwrite and this loop does not feed back, or not always (because
            of a guard); the next iteration gets their earlier value.
        exits: the routes that it holds, each with the loop's position in the route's `holds`.
        dispensable: the routes with a guard between two nodes directly in its body, to an optional input that
            nothing else feeds. Where the guard is false, the second node does not wait for the first one.
    """

    index: int
    name: str
    parent: int
    lineage: tuple[int, ...]
    max_iters: int | str | None
    steps: int
    nodes: tuple[int, ...]
    inner: tuple[int, ...]
    resident: bool
    external_inputs: frozenset[InputPort]
    external_outputs: frozenset[tuple[str, Destination]]
    loop_back: frozenset[InputPort]
    cleared: tuple[InputPort, ...]
    restored: tuple[InputPort, ...]
    exits: tuple[tuple[Route, int], ...]
    dispensable: tuple[Route, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCheckpoint:
    """What is stored of a loop, so that a later attempt can begin with it.

    Attributes:
        loop: its name.
        every: the number of iterations from one checkpoint to the next.
        node: feeds all values back.
        edges: the names of the values.
    """

    loop: str
    every: int
    node: str
    edges: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWalk:
    """A compiled walk.

    Attributes:
        nodes: by name.
        loops: by name.
        args: the walk's arguments that are a loop's `max_iters`.
        inputs: the inputs that a run must be given: the external inputs, and the first value of each
            loop-back input that nothing else in the walk feeds.
        consumers: the nodes that take each of these inputs, by the input's name.
        external_inputs: inputs that nothing in the walk feeds.
        external_outputs: the edges to `CLIENT` and `KEEP`.
        loop_back: inputs that an iteration feeds to the next one, over all loops.
        restorers: by input, the loops that restore it, outermost first.
        guarded: an edge has a guard, so nodes may be skipped.
        stream_consumers: the indices of the nodes that take streams.
        checkpoints: of the loops that have any.
        node_table: all nodes by index.
        loop_table: all loops by index; 0 is the walk.
    """

    name: str
    section: Section
    nodes: Mapping[str, CompiledNode]
    loops: Mapping[str, CompiledLoop]
    args: frozenset[str]
    inputs: frozenset[InputPort]
    consumers: Mapping[str, tuple[str, ...]]
    external_inputs: frozenset[InputPort]
    external_outputs: frozenset[tuple[str, Destination]]
    loop_back: frozenset[InputPort]
    restorers: Mapping[InputPort, tuple[int, ...]]
    guarded: bool
    stream_consumers: tuple[int, ...]
    checkpoints: tuple[LoopCheckpoint, ...]
    node_table: tuple[CompiledNode, ...] = field(repr=False)
    loop_table: tuple[CompiledLoop, ...] = field(repr=False)

    def max_iters(self, args: Mapping[str, Any]) -> list[int]:
        """Return the maximum iterations of each loop, by index; `UNLIMITED` for a loop without a maximum.

        Raises:
            WalkError: an argument is missing, or is not a number of iterations.
        """
        if missing := sorted(self.args - args.keys()):
            raise WalkError(
                f"walk {self.name!r} needs the arguments {missing} for its loops; found {sorted(args)}"
            )
        limits = (args[n] if isinstance(n := loop.max_iters, str) else n for loop in self.loop_table)
        return [
            UNLIMITED if loop.max_iters is None else check_max_iters(loop.name, limit)
            for loop, limit in zip(self.loop_table, limits, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """Return the walk as plain data, equal for equal walks in every process."""
        return {"walk": self.name, "section": describe(self.section)}
