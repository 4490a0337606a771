"""Checkpoints of loops: the values with which a later attempt begins a loop in place of its inputs.

A loop with `checkpoint=5` stores what its iterations 5, 10, 15, ... are fed. All of it comes from one node,
and each value takes the place of an input of the walk. So a run that begins with a checkpoint is an ordinary
run with other inputs, and equal on every rank. It counts its iterations from 0 again: the values have to say
how far it is, and a node ends it (`StatelessResult.stops`). Nothing inside may depend on anything else: on
the number of the iteration, on what a node remembers, on what has been emitted.
"""

from collections.abc import Sequence

from shared.walks.compiled import CompiledLoop, CompiledNode, InputPort, LoopCheckpoint, Route
from shared.walks.errors import WalkError
from shared.walks.language import Loop, ToClient


def checkpoints_of(
    declared: Sequence[Loop],
    loops: Sequence[CompiledLoop],
    nodes: Sequence[CompiledNode],
    inputs: frozenset[InputPort],
) -> tuple[LoopCheckpoint, ...]:
    """Return the checkpoints of a walk's loops; `inputs` are the inputs of the walk.

    Raises:
        WalkError: a loop has a checkpoint, but could not begin with it.
    """
    return tuple(
        _checkpoint(written.checkpoint, loop, [nodes[index] for index in loop.nodes], inputs)
        for written, loop in zip(declared, loops, strict=True)
        if written.checkpoint
    )


def _checkpoint(
    every: int, loop: CompiledLoop, inside: Sequence[CompiledNode], inputs: frozenset[InputPort]
) -> LoopCheckpoint:
    what = f"loop {loop.name!r} has checkpoints"
    fed = [route for node in inside for route in node.routes if route.back and route.loop == loop.index]
    sources = sorted({route.source for route in fed})
    if len(sources) != 1:
        raise WalkError(f"{what}: one node has to feed back all of its values, found {sources}")
    edges = {route.edge for route in fed}
    others = sorted(node for edge, node in inputs - loop.loop_back if edge in edges)
    first = sorted(edge for edge, node in loop.loop_back if (edge, node) not in inputs)
    if first or others:
        raise WalkError(
            f"{what}: what it is fed first has to be inputs of the walk that no node outside takes; "
            + (f"{first} come from nodes of the walk" if first else f"nodes {others} take them, too")
        )
    if found := _obstacle(loop, inside, fed):
        raise WalkError(f"{what}, which {found}: a run that begins in its middle would differ")
    return LoopCheckpoint(loop=loop.name, every=every, node=sources[0], edges=tuple(sorted(edges)))


def _obstacle(loop: CompiledLoop, inside: Sequence[CompiledNode], fed: Sequence[Route]) -> str:
    """What a loop has besides the values that it feeds back; empty if nothing."""
    routes = [route for node in inside for route in node.routes]
    if loop.inner or len(loop.lineage) > 1:
        return "is nested"
    if any(node.streams or node.streaming for node in inside):
        return "takes or gives streams"
    if any(route.when for route in fed):
        return "feeds values back under a condition"
    if any(listed for route in routes for _, listed in route.holds):
        return "accumulates values"
    if any(isinstance(route.to, ToClient) and not route.holds for route in routes):
        return "emits values in every iteration"
    return ""
