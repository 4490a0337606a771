"""The compiler: checks a walk and resolves it.

For every edge it determines which loops the edge leaves and in whose iteration it arrives; both follow from
the innermost loop around the edge's two ends. Then it determines for every input of every node which edges
feed it in which loop. At most one edge may feed it in *every* iteration of some loop (a forward edge), or
it comes from outside. Further inside, each loop may feed it back once, for its own next iteration. So the
value that a node receives never depends on timing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from types import MappingProxyType
from typing import TypeAlias

from shared.walks.checkpoints import checkpoints_of
from shared.walks.compiled import CompiledLoop, CompiledNode, CompiledWalk, InputPort, Route
from shared.walks.errors import WalkError
from shared.walks.language import (
    KEEP_RELEASED,
    Edge,
    Keep,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamingEdge,
    ToClient,
    check_name,
)

Position: TypeAlias = tuple[tuple[bool, int], ...]
"""The path from the root to a node: for every section, whether it is a Parallel, and the branch's index."""


def compile_walk(name: str, section: Section) -> CompiledWalk:
    """Check a walk and resolve it.

    Raises:
        WalkError: the walk is invalid; the message names the walk, the place and a remedy.
    """
    check_name("a walk", name)
    try:
        return _Compiler(name, section).walk()
    except WalkError as error:
        raise WalkError(f"walk {name!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class _PlacedNode:
    """A node with its position; `lineage` is the enclosing loops, from the walk inwards."""

    index: int
    node: Node
    lineage: tuple[int, ...]
    position: Position

    def leads_to(self, other: "_PlacedNode") -> bool:
        """Return whether an edge to `other` stays within the iteration."""
        for (parallel, mine), (_, its) in zip(self.position, other.position, strict=False):
            if mine != its:
                return parallel or mine < its
        return False  # from a node to itself


class _Compiler:
    """One compilation: positions, then routes, then checks, then the properties of each loop."""

    def __init__(self, name: str, section: Section) -> None:
        self.name = name
        self.section = section
        self.places: dict[str, _PlacedNode] = {}
        self.loops = [Loop(name, section, 1)]  # the walk itself
        self.lineages: list[tuple[int, ...]] = [(0,)]
        self.place(section, (0,), ())

        self.routes: list[Route] = []
        self.feeds: dict[InputPort, dict[int, Route]] = {
            pair: {} for pair in self.pairs(self.places.values())
        }
        for place in self.places.values():
            for edge in place.node.edges:
                self.route(place, edge)
            for streaming in place.node.streaming:
                self.check_streaming(place, streaming)
        self.guarded = any(route.when for route in self.routes)
        for feeds in self.feeds.values():
            self.check_feeds(feeds)
        for index in range(len(self.loops)):
            self.check_order(index)
        self.check_optional()

    # ---- places ------------------------------------------------------------------------------------
    def place(self, section: Section, lineage: tuple[int, ...], position: Position) -> None:
        match section:
            case Node():
                if section.name in self.places:
                    raise WalkError(
                        f"two nodes are named {section.name!r}; rename one: edges refer to nodes by name"
                    )
                self.places[section.name] = _PlacedNode(len(self.places), section, lineage, position)
            case Loop():
                if self.is_loop(section.name):
                    raise WalkError(
                        f"two loops are named {section.name!r}; rename one: loops are stopped by name"
                    )
                lineage = (*lineage, len(self.loops))
                self.loops.append(section)
                self.lineages.append(lineage)
                self.place(section.body, lineage, position)
            case Sequential() | Parallel():
                for branch, part in enumerate(section.sections):
                    self.place(part, lineage, (*position, (isinstance(section, Parallel), branch)))

    def is_loop(self, name: str) -> bool:
        return any(name == loop.name for loop in self.loops[1:])

    @staticmethod
    def pairs(places: Iterable[_PlacedNode]) -> Iterator[InputPort]:
        return ((edge, place.node.name) for place in places for edge in place.node.values)

    # ---- routes ------------------------------------------------------------------------------------
    def route(self, place: _PlacedNode, edge: Edge) -> None:
        where = f"edge {edge.name!r} of node {place.node.name!r}"
        target = self.target(where, edge)
        left = [index for index in reversed(place.lineage[1:]) if not target or index not in target.lineage]
        holds = tuple(self.holds(where, edge, left))
        arrives = self.lineages[holds[-1][0]][-2] if holds else place.lineage[-1]
        back = target is not None and not place.leads_to(target)
        if back and arrives == 0:
            raise WalkError(
                f"{where} goes back to node {edge.to!r}, but no loop is around both; put them into one"
            )
        if isinstance(edge.to, Keep) and any((edge.name, edge.to) == (it.edge, it.to) for it in self.routes):
            raise WalkError(f"{where} goes to KEEP, and so does another of that name; rename one of them")
        route = Route(
            index=len(self.routes),
            edge=edge.name,
            source=place.node.name,
            to=edge.to,
            holds=holds,
            loop=arrives,
            back=back,
            when=edge.when,
            keeps_released=edge.on_resume == KEEP_RELEASED,
        )
        self.check_on_resume(where, route)
        self.routes.append(route)
        if target is None:
            return
        other = self.feeds[edge.name, target.node.name].setdefault(arrives, route)
        if other is not route:
            raise self.clash(route, other)

    def check_on_resume(self, where: str, route: Route) -> None:
        """Check that a node's edges to the client in one modality agree on `on_resume`."""
        same = (it for it in self.routes if (it.source, it.to) == (route.source, route.to))
        if any(it.keeps_released is not route.keeps_released for it in same):
            raise WalkError(
                f"{where} goes to {route.to}, and so does another edge of the node with another on_resume; "
                "give both the same: chunks of one modality are told apart by their order only"
            )

    def target(self, where: str, edge: Edge) -> _PlacedNode | None:
        if not isinstance(edge.to, str):
            return None
        target = self.places.get(edge.to)
        if target is None:
            hint = "a loop, not a node; send it to a node inside" if self.is_loop(edge.to) else "unknown"
            raise WalkError(
                f"{where} goes to {edge.to!r}, which is {hint}; the nodes are {sorted(self.places)}"
            )
        if edge.name in target.node.streams:
            raise WalkError(
                f"{where} goes to node {edge.to!r}, which takes it as a stream; streams come from another "
                "walk, by a StreamingEdge: let the node take it as a value, or move it into a separate walk"
            )
        if edge.name not in target.node.values:
            takes = sorted(target.node.values)
            raise WalkError(f"{where} goes to node {edge.to!r}, which has no such input; it takes {takes}")
        return target

    def holds(self, where: str, edge: Edge, left: list[int]) -> Iterator[tuple[int, bool]]:
        """Return those of the loops that an edge leaves that hold its value, each with "as a list"."""
        for index in left:
            loop = self.loops[index]
            if edge.name in loop.outputs or edge.name in loop.accumulated:
                yield index, edge.name in loop.accumulated
            elif not isinstance(edge.to, ToClient):
                to = f"node {edge.to!r}" if isinstance(edge.to, str) else edge.to
                raise WalkError(
                    f"{where} leaves loop {loop.name!r} for {to}; name it in the loop's outputs (the last "
                    "iteration's value) or accumulated (the list of all)"
                )

    # ---- checks ------------------------------------------------------------------------------------
    def check_streaming(self, place: _PlacedNode, edge: StreamingEdge) -> None:
        if edge.to in self.places:
            raise WalkError(
                f"streaming edge {edge.name!r} of node {place.node.name!r} goes to node {edge.to!r} of the "
                "same walk; a stream connects two walks that run concurrently: use an Edge, or move the "
                "node into a separate walk"
            )

    def check_optional(self) -> None:
        """Check that each optional input can be missing: because of a guard, or of a skipped producer."""
        missing: set[InputPort] = set()
        known = -1
        while known < len(missing):
            known = len(missing)
            skipped = {node for edge, node in missing if edge not in self.places[node].node.optional}
            missing |= {
                (route.edge, route.to)
                for route in self.routes
                if isinstance(route.to, str) and not route.back and (route.when or route.source in skipped)
            }
        for place in self.places.values():
            for edge in place.node.optional:
                if (edge, place.node.name) not in missing:
                    raise WalkError(
                        f"input {edge!r} of node {place.node.name!r} is declared optional, but every path "
                        "supplies it; add a guard (when) to an edge on the way, or remove it from the list"
                    )

    def check_feeds(self, feeds: dict[int, Route]) -> None:
        """Check that an input with a forward edge has no producer in an outer loop as well."""
        for route in feeds.values():
            outer = [index for index in self.lineages[route.loop][:-1] if index in feeds]
            if outer and not route.back:
                raise self.clash(route, feeds[outer[0]])

    def clash(self, one: Route, other: Route) -> WalkError:
        sources = sorted((one.source, other.source))
        return WalkError(
            f"input {one.edge!r} of node {one.to!r} is fed twice in one iteration of {self.show(one.loop)}, "
            f"by nodes {sources}; rename one of the edges"
        )

    def check_order(self, loop: int) -> None:
        """Check that the siblings of a Parallel do not feed one another in a cycle."""
        waits: dict[str, list[str]] = {}
        for route in self.routes:
            if route.loop == loop and not route.back and isinstance(route.to, str):
                waits.setdefault(self.step(route.to, loop), []).append(self.step(route.source, loop))
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            circle = " -> ".join(error.args[1])
            raise WalkError(
                f"no node can start an iteration of {self.show(loop)}: {circle} feed one another; "
                "put them into a Sequential inside a Loop, where an edge may go back"
            ) from None

    def step(self, node: str, loop: int) -> str:
        """Return the part of the loop's body that contains the node."""
        lineage = self.places[node].lineage
        inside = lineage[lineage.index(loop) + 1 :]
        return self.show(inside[0]) if inside else f"node {node!r}"

    def show(self, loop: int) -> str:
        return f"loop {self.loops[loop].name!r}" if loop else "the walk"

    # ---- results -----------------------------------------------------------------------------------
    def walk(self) -> CompiledWalk:
        nodes = tuple(self.node(place) for place in self.places.values())
        loops = tuple(self.loop(index) for index in range(len(self.loops)))
        inputs = sorted(pair for pair, feeds in self.feeds.items() if all(it.back for it in feeds.values()))
        restored = chain.from_iterable(loop.restored for loop in loops)
        restorers = {pair: tuple(loop.index for loop in loops if pair in loop.restored) for pair in restored}
        consumers = {name: tuple(node for edge, node in inputs if edge == name) for name, _ in inputs}
        return CompiledWalk(
            name=self.name,
            section=self.section,
            nodes=MappingProxyType({node.name: node for node in nodes}),
            loops=MappingProxyType({loop.name: loop for loop in loops[1:]}),
            args=frozenset(loop.max_iters for loop in loops if isinstance(loop.max_iters, str)),
            inputs=frozenset(inputs),
            consumers=MappingProxyType(consumers),
            external_inputs=loops[0].external_inputs,
            external_outputs=loops[0].external_outputs,
            loop_back=frozenset(chain.from_iterable(loop.loop_back for loop in loops)),
            restorers=MappingProxyType(restorers),
            guarded=self.guarded,
            stream_consumers=tuple(node.index for node in nodes if node.streams),
            checkpoints=checkpoints_of(self.loops, loops, nodes, frozenset(inputs)),
            node_table=nodes,
            loop_table=loops,
        )

    def node(self, place: _PlacedNode) -> CompiledNode:
        return CompiledNode(
            index=place.index,
            name=place.node.name,
            loop=place.lineage[-1],
            inputs=place.node.values,
            streams=place.node.streams,
            optional=frozenset(place.node.optional),
            input_count=len(place.node.inputs),
            outputs=frozenset(edge.name for edge in place.node.edges),
            routes=tuple(route for route in self.routes if route.source == place.node.name),
            streaming=place.node.streaming,
        )

    def loop(self, index: int) -> CompiledLoop:
        loop, lineage = self.loops[index], self.lineages[index]
        inside = [place for place in self.places.values() if index in place.lineage]
        inner = tuple(other for other, line in enumerate(self.lineages) if index in line[:-1])
        steps = [place for place in inside if place.lineage[-1] == index]
        loops = [other for other in inner if self.lineages[other][-2] == index]
        cleared, restored, external = self.inputs_of(index, inside)
        return CompiledLoop(
            index=index,
            name=loop.name,
            parent=lineage[-2] if index else 0,
            lineage=lineage[1:],
            max_iters=loop.max_iters,
            steps=len(steps) + len(loops),
            nodes=tuple(place.index for place in inside),
            inner=inner,
            resident=len(inside) == 1 and not inner,
            external_inputs=frozenset(external),
            external_outputs=frozenset((route.edge, route.to) for route in self.leaving(index)),
            loop_back=frozenset(p for p, feeds in self.feeds.items() if index in feeds and feeds[index].back),
            cleared=tuple(cleared),
            restored=tuple(restored),
            exits=tuple(
                (route, at)
                for route in self.routes
                for at, (held, _) in enumerate(route.holds)
                if held == index
            ),
            dispensable=tuple(route for route in self.routes if self.is_dispensable(route, index)),
        )

    def is_dispensable(self, route: Route, loop: int) -> bool:
        """Return whether a guard may let an optional input directly in this loop be missing."""
        if route.when is None or route.loop != loop or route.back or not isinstance(route.to, str):
            return False
        target = self.places[route.to]
        is_only_feed = len(self.feeds[route.edge, route.to]) == 1
        ends_here = self.places[route.source].lineage[-1] == target.lineage[-1] == loop
        return route.edge in target.node.optional and is_only_feed and ends_here

    def leaving(self, index: int) -> list[Route]:
        loop = self.loops[index]
        leaving = [
            route
            for route in self.routes
            if index in self.places[route.source].lineage
            and not (isinstance(route.to, str) and index in self.places[route.to].lineage)
        ]
        for name in (*loop.outputs, *loop.accumulated):
            if all(name != route.edge for route in leaving):
                found = sorted({route.edge for route in leaving})
                raise WalkError(
                    f"loop {loop.name!r} declares {name!r}, but no edge of that name leaves it; {found} do"
                )
        return leaving

    def inputs_of(
        self, index: int, inside: list[_PlacedNode]
    ) -> tuple[list[InputPort], list[InputPort], list[InputPort]]:
        """Return the inputs that the next iteration of a loop clears, restores, and keeps."""
        cleared, restored, external = [], [], []
        for place in inside:
            cleared += [(stream, place.node.name) for stream in place.node.streams]
            within = place.lineage[place.lineage.index(index) :]
            for pair in self.pairs([place]):
                feeds = {loop: route for loop, route in self.feeds[pair].items() if loop in within}
                if not feeds:
                    external.append(pair)
                elif not all(route.back for route in feeds.values()):
                    cleared.append(pair)
                elif index not in feeds or (self.guarded and len(feeds) > 1):
                    restored.append(pair)
        return cleared, restored, external
