"""Runs against a naive interpreter, on random walks.

The interpreter has no slots, routes or phases. It executes the section recursively, like a program, with one
store of visible values.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.walks import (
    KEEP,
    Destination,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
    WalkRun,
    compile_walk,
)
from tests.shared.walks.drawn import nodes_of, produced, walks

pytestmark = pytest.mark.slow


MISSING: Final = "missing"
"""What the interpreter has in the place of a value that does not come."""


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
        """Execute a section; return the values that it sends outside, or back to its start."""
        match section:
            case Node():
                return self.fire(section, path)
            case Sequential() | Parallel():
                return self.compose(section, path)
            case Loop():
                return self.loop(section, path)

    def fire(self, node: Node, path: tuple[int, ...]) -> list[Sent]:
        inputs = {name: self.store[name, node.name] for name in node.values}
        missing = {name for name, value in inputs.items() if value is MISSING}
        inputs = {name: value for name, value in inputs.items() if value is not MISSING}
        is_skipped = bool(missing - {*node.optional})
        if not is_skipped:
            self.firings.append((node.name, path, repr(inputs)))
        sent = []
        for edge in node.edges:
            sends = not is_skipped and (edge.when is None or edge.when(path[-1] if path else 0, {}))
            value = produced(node.name, edge.name, path, inputs) if sends else MISSING
            sent.append(Sent(edge.name, edge.to, value, node.name, path))
        return sent

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
        held: dict[tuple[str, Destination, str], Any] = {}
        leaving = []
        assert isinstance(loop.max_iters, int)
        for iteration in range(min(loop.max_iters, self.stops.get(loop.name, loop.max_iters))):
            self.store |= entry
            for sent in self.run(loop.body, (*path, iteration)):
                key = (sent.edge, sent.to, sent.node)
                if sent.to in inside:
                    if sent.value is not MISSING:  # what is not fed back is as it was
                        entry[sent.edge, str(sent.to)] = sent.value
                elif sent.value is MISSING:
                    held.setdefault(key, MISSING)
                elif sent.edge in loop.accumulated:
                    before = held.get(key, MISSING)
                    held[key] = [*(() if before is MISSING else before), sent.value]
                elif sent.edge in loop.outputs:
                    held[key] = sent.value
                else:
                    leaving.append(sent)
        return leaving + [Sent(edge, to, value, node, path) for (edge, to, node), value in held.items()]


def first_free(parts: list[Section]) -> Iterator[Section]:
    """Return the parts that no other part feeds."""
    for part in parts:
        takers = {node.name for node in nodes_of(part)}
        others = [node for other in parts if other is not part for node in nodes_of(other)]
        if not any(edge.to in takers for node in others for edge in node.edges):
            yield part


# ---- the property ----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(walks(), st.integers(0, 2**32))
def test_every_run_does_what_the_naive_interpreter_does(
    drawn: tuple[Section, dict[str, int]], seed: int
) -> None:
    section, stops = drawn
    walk = compile_walk("walk", section)
    inputs = {name: f"given {name}" for name in walk.consumers}

    naive = Interpreter(stops, {(edge, node): inputs[edge] for edge, node in walk.inputs})
    sent = [each for each in naive.run(section) if each.value is not MISSING]

    chance = random.Random(seed)
    run = WalkRun(walk)
    run.start(inputs)
    pending, firings, emissions = list(run.take_ready()), [], []
    while pending:
        firing = pending.pop(chance.randrange(len(pending)))
        taken = {n: firing.inputs[n] for n in walk.nodes[firing.node].inputs if n in firing.inputs}
        firings.append((firing.node, firing.path, repr(taken)))
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
