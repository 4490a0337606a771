"""Runs against a naive interpreter, on random walks.

The interpreter knows nothing of slots, routes or phases: it walks the section recursively and executes
it as one would a program, with one store of visible values.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.walks import (
    CLIENT,
    KEEP,
    Destination,
    Edge,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    WalkRun,
    compile_walk,
)

NAMES = ("x", "y", "z")


def produced(node: str, edge: str, path: tuple[int, ...], inputs: Mapping[str, Any]) -> str:
    """What every node computes: a value that says where it is from and what it was made of."""
    made_of = hash((node, edge, path, repr(sorted(inputs.items())))) & 0xFFFFFFFF
    return f"{node}.{edge}{path}#{made_of:08x}"


# ---- the naive interpreter -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    edge: str
    to: Destination
    value: Any
    node: str
    path: tuple[int, ...]


@dataclass(slots=True)
class Interpreter:
    stops: Mapping[str, int]
    store: dict[tuple[str, str], Any]
    firings: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)

    def run(self, section: Section, path: tuple[int, ...] = ()) -> list[Sent]:
        """Execute a section; what it sends to places outside itself, or back to its beginning."""
        match section:
            case Node():
                return self.fire(section, path)
            case Sequential() | Parallel():
                return self.compose(section, path)
            case Loop():
                return self.loop(section, path)

    def fire(self, node: Node, path: tuple[int, ...]) -> list[Sent]:
        inputs = {name: self.store[name, node.name] for name in node.values}
        self.firings.append((node.name, path, repr(inputs)))
        return [
            Sent(edge.name, edge.to, produced(node.name, edge.name, path, inputs), node.name, path)
            for edge in node.outputs
        ]

    def compose(self, section: Sequential | Parallel, path: tuple[int, ...]) -> list[Sent]:
        waiting, leaving = list(section.sections), []
        while waiting:
            part = waiting[0] if isinstance(section, Sequential) else next(first_free(waiting))
            waiting.remove(part)
            for sent in self.run(part, path):
                if any(sent.to == node.name for other in waiting for node in nodes_of(other)):
                    self.store[sent.edge, str(sent.to)] = sent.value
                else:
                    leaving.append(sent)
        return leaving

    def loop(self, loop: Loop, path: tuple[int, ...]) -> list[Sent]:
        inside = {node.name for node in nodes_of(loop.body)}
        entry = {pair: value for pair, value in self.store.items() if pair[1] in inside}
        back: dict[tuple[str, str], Any] = {}
        held: dict[tuple[str, Destination, str], Any] = {}
        leaving = []
        assert isinstance(loop.max_iters, int)
        for iteration in range(min(loop.max_iters, self.stops.get(loop.name, loop.max_iters))):
            self.store |= entry | back
            back = {}
            for sent in self.run(loop.body, (*path, iteration)):
                key = (sent.edge, sent.to, sent.node)
                if sent.to in inside:
                    back[sent.edge, str(sent.to)] = sent.value
                elif sent.edge in loop.accumulated:
                    held.setdefault(key, []).append(sent.value)
                elif sent.edge in loop.outputs:
                    held[key] = sent.value
                else:
                    leaving.append(sent)
        return leaving + [Sent(edge, to, value, node, path) for (edge, to, node), value in held.items()]


def nodes_of(section: Section) -> Iterator[Node]:
    match section:
        case Node():
            yield section
        case Loop():
            yield from nodes_of(section.body)
        case Sequential() | Parallel():
            for part in section.sections:
                yield from nodes_of(part)


def first_free(parts: list[Section]) -> Iterator[Section]:
    """The parts that none of the others feeds."""
    for part in parts:
        takers = {node.name for node in nodes_of(part)}
        others = [node for other in parts if other is not part for node in nodes_of(other)]
        if not any(edge.to in takers for node in others for edge in node.outputs):
            yield part


# ---- random walks ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Spot:
    """A node to be, and where: the loops around it and the forks above it, outermost first."""

    name: str
    loops: tuple[str, ...]
    forks: tuple[tuple[str, int], ...]
    inputs: set[str] = field(default_factory=set)
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
                self.draw(st.sampled_from(self.spots)).edges.append(Edge(name, KEEP))
            for spot in self.spots:
                if self.draw(st.integers(0, 3)) == 0:
                    spot.edges.append(Edge(name, CLIENT("text")))
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
        """One input: fed forward from somewhere or from outside; then back, by any loop further in."""
        spot.inputs.add(name)
        depth = 0
        before = [other for other in self.spots if other.leads_to(spot, self.reversed_forks)]
        if before and self.draw(st.booleans()):
            source = self.draw(st.sampled_from(before))
            source.edges.append(Edge(name, spot.name))
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
                self.draw(st.sampled_from(sources)).edges.append(Edge(name, spot.name))

    def beside(self, one: Spot, other: Spot) -> bool:
        """Whether an edge between the two would stay in the iteration, though against the drawn order."""
        for (fork, mine), (_, its) in zip(one.forks, other.forks, strict=False):
            if mine != its:
                return fork in self.parallel
        return False

    def build(self, tree: Any) -> Section:
        if isinstance(tree, Spot):
            return Node(tree.name, sorted(tree.inputs), list(dict.fromkeys(tree.edges)))
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
def walks(draw: st.DrawFn) -> tuple[Section, dict[str, int]]:
    """A walk, and after how many iterations some of its loops are stopped."""
    builder = Builder(draw)
    section = builder.section()
    stopped = [loop for loop in builder.iters if draw(st.integers(0, 2)) == 0]
    return section, {loop: draw(st.integers(1, builder.iters[loop])) for loop in stopped}


# ---- the property ----------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(walks(), st.integers(0, 2**32))
def test_every_run_does_what_the_naive_interpreter_does(
    drawn: tuple[Section, dict[str, int]], seed: int
) -> None:
    section, stops = drawn
    walk = compile_walk("walk", section)
    inputs = {name: f"given {name}" for name in walk.takers}

    naive = Interpreter(stops, {(edge, node): inputs[edge] for edge, node in walk.inputs})
    sent = naive.run(section)

    chance = random.Random(seed)
    run = WalkRun(walk)
    run.start(inputs)
    pending, firings, emissions = list(run.take_ready()), [], []
    while pending:
        firing = pending.pop(chance.randrange(len(pending)))
        firings.append(
            (firing.node, firing.path, repr({n: firing.inputs[n] for n in walk.nodes[firing.node].inputs}))
        )
        ending = [
            walk.loop_table[index].name
            for index, iteration in zip(
                walk.loop_table[walk.nodes[firing.node].loop].lineage, firing.path, strict=True
            )
            if stops.get(walk.loop_table[index].name) == iteration + 1
        ]
        outputs = {
            edge: produced(firing.node, edge, firing.path, firing.inputs)
            for edge in walk.nodes[firing.node].outputs
        }
        stop_first = chance.random() < 0.5
        if stop_first:
            for loop in ending:
                assert run.stop(loop) == []
        released = run.complete(firing, outputs)
        assert released is not None
        emissions += released
        if not stop_first:
            for loop in ending:
                emissions += run.stop(loop) or []  # it may have ended by itself
        assert run.complete(firing, outputs) is None  # a duplicate
        if walk.inputs and chance.random() < 0.3:
            edge, node = chance.choice(sorted(walk.inputs))
            run.deliver(edge, node, inputs[edge])  # another
        if chance.random() < 0.7 or not pending:
            pending += run.take_ready()

    assert run.done
    assert run.take_ready() == []
    assert len(set(firings)) == len(firings)
    assert Counter(firings) == Counter(naive.firings)
    assert Counter(map(repr, sent)) == Counter(
        repr(Sent(e.edge, e.to, e.value, e.node, e.path)) for e in emissions
    )
    kept = {each.edge: each.value for each in sent if each.to == KEEP}
    assert run.outputs | run.accumulated == kept
