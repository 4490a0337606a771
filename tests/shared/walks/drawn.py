"""Random walks: a tree of sections, edges that make sense in it, guards, streams and early stops."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from shared.walks import (
    CLIENT,
    KEEP,
    Edge,
    Guard,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    StreamInput,
)
from tests.shared.walks.sections import even, never, odd

NAMES = ("x", "y", "z")
STREAM = "items"


def produced(node: str, edge: str, path: tuple[int, ...], inputs: Mapping[str, Any]) -> str:
    """Compute a node's output: a value that records its origin and its inputs."""
    made_of = hash((node, edge, path, repr(sorted(inputs.items())))) & 0xFFFFFFFF
    return f"{node}.{edge}{path}#{made_of:08x}"


def nodes_of(section: Section) -> Iterator[Node]:
    match section:
        case Node():
            yield section
        case Loop():
            yield from nodes_of(section.body)
        case Sequential() | Parallel():
            for part in section.sections:
                yield from nodes_of(part)


@dataclass(slots=True)
class Spot:
    """A planned node with its position: the enclosing loops and sections, outermost first."""

    name: str
    loops: tuple[str, ...]
    forks: tuple[tuple[str, int], ...]
    inputs: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    takes_stream: bool = False
    edges: list[Edge] = field(default_factory=list)

    def common(self, other: "Spot") -> tuple[str, ...]:
        return tuple(mine for mine, its in zip(self.loops, other.loops, strict=False) if mine == its)

    def leads_to(self, other: "Spot", reversed_forks: set[str]) -> bool:
        for (fork, mine), (_, its) in zip(self.forks, other.forks, strict=False):
            if mine != its:
                return (mine > its) if fork in reversed_forks else (mine < its)
        return False


@dataclass(slots=True)
class Builder:
    """Draws a tree of sections, then edges that make sense in it, then the declarations of loops."""

    draw: Any
    has_guards: bool
    has_streams: bool
    spots: list[Spot] = field(default_factory=list)
    iters: dict[str, int] = field(default_factory=dict)
    parallel: set[str] = field(default_factory=set)
    reversed_forks: set[str] = field(default_factory=set)
    forks: int = 0

    def section(self) -> Section:
        tree = self.tree(5, (), ())
        for spot in self.spots:
            for name in sorted(self.draw(st.sets(st.sampled_from(NAMES), max_size=2))):
                self.feed(spot, name)
        for name in NAMES:
            if self.draw(st.booleans()):
                self.draw(st.sampled_from(self.spots)).edges.append(Edge(name, KEEP, self.guard()))
            for spot in self.spots:
                if self.draw(st.integers(0, 3)) == 0:
                    spot.edges.append(Edge(name, CLIENT("text"), self.guard()))
        for spot in self.spots if self.has_streams else ():
            spot.takes_stream = self.draw(st.integers(0, 2)) == 0
        return self.build(tree)

    def tree(self, depth: int, loops: tuple[str, ...], forks: tuple[tuple[str, int], ...]) -> Any:
        kinds = ("loop", "fork", "loop", "fork", "node")[: 3 + len(self.spots)]  # not one node, too often
        kind = self.draw(st.sampled_from(kinds)) if depth else "node"
        if kind == "node" or len(self.spots) >= 8:
            self.spots.append(Spot(f"n{len(self.spots)}", loops, forks))
            return self.spots[-1]
        if kind == "loop":
            name = f"l{len(self.iters)}"
            self.iters[name] = self.draw(st.integers(1, 3))
            return name, self.tree(depth - 1, (*loops, name), forks)
        name = f"f{self.forks}"
        self.forks += 1
        if self.draw(st.booleans()):
            self.parallel.add(name)
            if self.draw(st.booleans()):
                self.reversed_forks.add(name)
        parts = self.draw(st.integers(2, 3))
        return name, [self.tree(depth - 1, loops, (*forks, (name, part))) for part in range(parts)]

    def feed(self, spot: Spot, name: str) -> None:
        """Draw one input: fed forward by a node or from outside, then fed back by inner loops."""
        spot.inputs.add(name)
        depth = 0
        before = [other for other in self.spots if other.leads_to(spot, self.reversed_forks)]
        if before and self.draw(st.booleans()):
            source = self.draw(st.sampled_from(before))
            source.edges.append(Edge(name, spot.name, guard := self.guard()))
            if guard and self.draw(st.booleans()):
                spot.optional.add(name)
            depth = len(source.common(spot))
        for at in range(depth, len(spot.loops)):
            sources = [
                other
                for other in self.spots
                if len(other.common(spot)) == at + 1
                and not other.leads_to(spot, self.reversed_forks)
                and not self.beside(other, spot)
            ]
            if sources and self.draw(st.booleans()):
                self.draw(st.sampled_from(sources)).edges.append(Edge(name, spot.name, self.guard()))

    def guard(self) -> Guard | None:
        return self.draw(st.sampled_from((None, even, odd, never))) if self.has_guards else None

    def beside(self, one: Spot, other: Spot) -> bool:
        """Return whether an edge would stay within the iteration although it reverses the order."""
        for (fork, mine), (_, its) in zip(one.forks, other.forks, strict=False):
            if mine != its:
                return fork in self.parallel
        return False

    def build(self, tree: Any) -> Section:
        if isinstance(tree, Spot):
            streams = [StreamInput(STREAM)] if tree.takes_stream else []
            edges = list(dict.fromkeys(tree.edges))
            return Node(tree.name, [*sorted(tree.inputs), *streams], edges, sorted(tree.optional))
        name, parts = tree
        if isinstance(parts, list):
            sections = [self.build(part) for part in parts]
            return Parallel(*sections) if name in self.parallel else Sequential(*sections)
        body = self.build(parts)
        inside = {node.name for node in nodes_of(body)}
        leaving = [edge for node in nodes_of(body) for edge in node.outputs if edge.to not in inside]
        must = {edge.name for edge in leaving if edge.to != CLIENT("text")}
        may = {edge.name for edge in leaving} - must
        holds: dict[str, list[str]] = {"outputs": [], "accumulated": []}
        for edge in sorted(must | {edge for edge in may if self.draw(st.booleans())}):
            holds[self.draw(st.sampled_from(("outputs", "accumulated")))].append(edge)
        return Loop(name, body, self.iters[name], holds["outputs"], holds["accumulated"])


@st.composite
def walks(draw: st.DrawFn, *, has_streams: bool = False) -> tuple[Section, dict[str, int]]:
    """A walk, and the number of iterations after which some of its loops are stopped."""
    builder = Builder(draw, draw(st.booleans()), has_streams)
    section = builder.section()
    stopped = [loop for loop in builder.iters if draw(st.integers(0, 2)) == 0]
    return section, {loop: draw(st.integers(1, builder.iters[loop])) for loop in stopped}
