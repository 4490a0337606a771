"""A walk that was found right, and all that follows from it.

Everything here is worked out once (`shared.walks.compiler`), is immutable, and is shared by all runs of
the walk. Nodes and loops are known by their index, in the order they were written; the walk itself is
loop 0, which runs once.
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
"""As many iterations as it takes until the loop is stopped."""

InputPort: TypeAlias = tuple[str, str]
"""One input of one node: the names of the edge and of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An edge, resolved.

    Attributes:
        holds: the loops that hold the value until they end, innermost first; True: they accumulate.
        loop: the loop in whose iteration the value arrives.
        back: it is for that loop's next iteration.
        when: sends only where this is true.
    """

    index: int
    edge: str
    source: str
    to: Destination
    holds: tuple[tuple[int, bool], ...]
    loop: int
    back: bool
    when: Guard | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledNode:
    """A node in its place.

    Attributes:
        loop: the innermost around it.
        inputs: those that are values, and `streams` those that are streams.
        optional: the inputs without which it fires, where a guard keeps them from it.
        takes: how many inputs it has.
        outputs: the names it must produce.
        routes: where they go.
        streaming: the edges into other walks; whoever runs the node sends their items. A name that only
            they have may be missing among what the node produces.
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
        """The names that it may produce, for streaming edges alone."""
        return frozenset(edge.name for edge in self.streaming) - self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLoop:
    """A loop in its place.

    Attributes:
        parent: the loop around it.
        lineage: itself and all loops around it but the walk, outermost first.
        steps: the nodes and loops directly in its body: what makes one iteration.
        nodes: all nodes inside, and `inner` all loops, at any depth.
        resident: the body is one single node, so an engine may keep the row inside until a stop.
        external_inputs: what nothing inside feeds, so that every iteration sees the same.
        external_outputs: the edges that leave it.
        loop_back: what one iteration feeds to the next.
        cleared: what every iteration has to wait for anew.
        restored: what inner loops overwrite and this one does not feed back, or not always (a guard), so
            that the next iteration sees it as it was.
        exits: the routes it holds, with the place it has in their `holds`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWalk:
    """A walk, ready to run.

    Attributes:
        nodes: by name, and `loops` too.
        args: the arguments of the walk that loops take their `max_iters` from.
        inputs: what a run must be given: the external inputs, and the first value of every loop-back
            that nothing else in the walk feeds.
        takers: the same by name: which nodes take it.
        external_inputs: what nothing in the walk feeds.
        external_outputs: the edges to `CLIENT` and `KEEP`.
        loop_back: what iterations feed to the next, over all loops.
        restorers: the loops that restore an input, outermost first.
        guarded: an edge has a guard, so a node may be skipped.
        stream_consumers: the nodes that take streams, by index.
        node_table: by index, and `loop_table` too, where 0 is the walk.
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
    node_table: tuple[CompiledNode, ...] = field(repr=False)
    loop_table: tuple[CompiledLoop, ...] = field(repr=False)

    def max_iters(self, args: Mapping[str, Any]) -> list[int]:
        """How often each loop may run, by index, under these arguments; `UNLIMITED` is until a stop.

        Raises:
            WalkError: an argument is missing, or is no number of iterations.
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
        """The walk as plain data: equal for equal walks, in every process."""
        return {"walk": self.name, "section": describe(self.section)}
