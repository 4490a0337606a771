"""One request on its way through one walk: a state machine without I/O.

Values come in by `deliver` (or all at once by `start`); `take_ready` hands out the nodes that can fire;
`complete` takes what a firing produced, sends it on, and returns what is released to the client or kept.
Values are opaque. The run holds only what is this request's own; the walk is shared.

Everything is counted by iterations, never by time. A firing is known by its node and its path (the
iteration of each loop around it, outermost first), so a duplicate is a duplicate and not the next
iteration. Loops iterate strictly: an iteration ends when everything in its body has fired, and the next
begins when `take_ready` is called next. Nested loops begin anew in each iteration of the outer one.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, TypeAlias

import msgspec

from shared.walks.compiled import CompiledLoop, CompiledNode, CompiledWalk, Pair, Route
from shared.walks.language import Client, Keep, WalkError

Value: TypeAlias = Any
"""Whatever travels on an edge: the run never looks into it."""


class Firing(msgspec.Struct, frozen=True):
    """An order to run a node: once, with these inputs."""

    node: str
    inputs: dict[str, Value]
    path: tuple[int, ...]


class Emission(msgspec.Struct, frozen=True):
    """A value that leaves the walk.

    `path` is that of the firing, or, for what a loop held, of the iteration the loop ended in.
    """

    edge: str
    to: Client | Keep
    value: Value
    node: str
    path: tuple[int, ...]


class _Phase(Enum):
    WAITING = auto()
    READY = auto()
    FIRING = auto()
    FIRED = auto()


class WalkRun:
    """One run of `walk`; `args` are the walk's arguments, of which loops take their `max_iters`.

    Attributes:
        done: everything has fired, as often as it should.
        outputs: what was kept, by name: where a loop held it, the value of its last iteration.
        accumulated: what was kept as a list, by name, in the order of iterations.
    """

    def __init__(self, walk: CompiledWalk, args: Mapping[str, Any] | None = None) -> None:
        self.walk = walk
        self.done = False
        self.outputs: dict[str, Value] = {}
        self.accumulated: dict[str, list[Value]] = {}
        loops, nodes = walk.loop_table, walk.node_table
        self._max_iters = walk.max_iters(args or {})
        self._iteration = [0] * len(loops)
        self._remaining = [loop.steps for loop in loops]
        self._stopping: set[int] = set()
        self._turning: list[int] = []  # loops: their iteration has ended, the next is to begin
        self._phase = [_Phase.WAITING] * len(nodes)
        self._ready: list[int] = []
        self._slots: list[dict[str, Value]] = [{} for _ in nodes]
        self._second: dict[Pair, Value] = {}  # delivered again: for the next iteration
        self._fed_back: list[dict[Pair, Value]] = [{} for _ in loops]  # for the loop's next iteration
        self._held: dict[tuple[int, int], Value] = {}  # by route and place in its holds
        self._saved: dict[tuple[Pair, int], Value] = {}  # by the loop that restores it
        for node in nodes:  # what takes no inputs
            self._check_ready(node)

    # ---- in ----------------------------------------------------------------------------------------
    def start(self, inputs: Mapping[str, Value]) -> None:
        """Deliver every input of the walk, by name, to all that take it.

        Raises:
            WalkError: not exactly the inputs the walk takes; nothing was delivered.
        """
        takers = self.walk.takers
        if inputs.keys() != takers.keys():
            raise WalkError(
                f"walk {self.walk.name!r} takes the inputs {sorted(takers)}, found {sorted(inputs)}"
            )
        for edge, value in inputs.items():
            for node in takers[edge]:
                self.deliver(edge, node, value)

    def deliver(self, edge: str, node: str, value: Value) -> bool:
        """Take one value from outside; False: refused, and nothing changed.

        A second one is for the node's next iteration; where the walk itself feeds that, it is dropped
        then. Refused are a third, what the walk does not take, and everything once the walk is done.
        """
        pair = (edge, node)
        if self.done or pair not in self.walk.inputs or pair in self._second:
            return False
        target = self.walk.nodes[node]
        if edge in self._slots[target.index]:
            self._second[pair] = value
        else:
            self._fill(target, pair, value, 0)
        return True

    # ---- out ---------------------------------------------------------------------------------------
    def take_ready(self) -> list[Firing]:
        """The nodes that can fire now, each firing once, in the order the walk was written."""
        for loop in self._turning:
            self._begin_iteration(self.walk.loop_table[loop])
        self._turning.clear()
        firings = []
        for index in sorted(self._ready):
            self._phase[index] = _Phase.FIRING
            node = self.walk.node_table[index]
            firings.append(Firing(node.name, dict(self._slots[index]), self._path(node.loop)))
        self._ready.clear()
        return firings

    def complete(self, firing: Firing, outputs: Mapping[str, Value]) -> list[Emission] | None:
        """Send on what a firing produced; what leaves the walk by it, in order.

        None: refused, and nothing changed, for this firing is not under way (it may be a duplicate).

        Raises:
            WalkError: not exactly the outputs the node declares; nothing changed.
        """
        node = self.walk.nodes.get(firing.node)
        if (
            node is None
            or self._phase[node.index] is not _Phase.FIRING
            or firing.path != self._path(node.loop)
        ):
            return None
        if outputs.keys() != node.outputs:
            raise WalkError(
                f"walk {self.walk.name!r}: node {node.name!r} must produce {sorted(node.outputs)}, "
                f"found {sorted(outputs)}"
            )
        self._phase[node.index] = _Phase.FIRED
        emissions: list[Emission] = []
        for route in node.routes:
            self._send(route, 0, outputs[route.edge], emissions)
        self._step_done(node.loop, emissions)
        return emissions

    def stop(self, loop: str) -> list[Emission] | None:
        """End a loop after the iteration that is under way; what leaves the walk by that, in order.

        Between two iterations it ends at once. None: refused, for the loop is not running.

        Raises:
            WalkError: the walk has no such loop.
        """
        found = self.walk.loops.get(loop)
        if found is None:
            raise WalkError(
                f"walk {self.walk.name!r} has no loop {loop!r}; its loops are {sorted(self.walk.loops)}"
            )
        emissions: list[Emission] = []
        if found.index in self._turning:
            self._turning.remove(found.index)
            self._end(found, emissions)
            return emissions
        if not self._is_running(found):
            return None
        self._stopping.add(found.index)
        return emissions

    # ---- values ------------------------------------------------------------------------------------
    def _send(self, route: Route, hold: int, value: Value, emissions: list[Emission]) -> None:
        """Send a value on from the place `hold` of its route: to a loop that holds it, or home."""
        if hold < len(route.holds):
            if route.holds[hold][1]:
                self._held.setdefault((route.index, hold), []).append(value)
            else:
                self._held[route.index, hold] = value
            return
        if isinstance(route.to, str):
            pair = (route.edge, route.to)
            if route.back:
                self._fed_back[route.loop][pair] = value
            else:
                self._fill(self.walk.nodes[route.to], pair, value, route.loop)
            return
        emissions.append(Emission(route.edge, route.to, value, route.source, self._path(route.loop)))
        if isinstance(route.to, Keep):
            listed = any(accumulates for _, accumulates in route.holds)
            (self.accumulated if listed else self.outputs)[route.edge] = value

    def _fill(self, node: CompiledNode, pair: Pair, value: Value, loop: int) -> None:
        """Fill an input with the value it has in the present iteration of `loop`."""
        slots = self._slots[node.index]
        slots[pair[0]] = value
        for restorer in self.walk.restorers.get(pair, ()):
            if restorer > loop:  # further in: along one lineage, indices rise
                self._saved[pair, restorer] = value
        self._check_ready(node)

    def _check_ready(self, node: CompiledNode) -> None:
        complete = len(self._slots[node.index]) == len(node.inputs)
        if complete and self._phase[node.index] is _Phase.WAITING:
            self._phase[node.index] = _Phase.READY
            self._ready.append(node.index)

    # ---- loops -------------------------------------------------------------------------------------
    def _step_done(self, index: int, emissions: list[Emission]) -> None:
        """A node or loop directly in this loop's body is done for this iteration."""
        self._remaining[index] -= 1
        if self._remaining[index]:
            return
        if index in self._stopping or self._iteration[index] + 1 == self._max_iters[index]:
            self._end(self.walk.loop_table[index], emissions)
        else:
            self._turning.append(index)

    def _end(self, loop: CompiledLoop, emissions: list[Emission]) -> None:
        """Release what the loop held. What it fed back for a next iteration is never asked for."""
        if loop.index == 0:
            self.done = True
            return
        for route, hold in loop.exits:
            self._send(route, hold + 1, self._held.pop((route.index, hold)), emissions)
        self._step_done(loop.parent, emissions)

    def _begin_iteration(self, loop: CompiledLoop) -> None:
        self._iteration[loop.index] += 1
        self._remaining[loop.index] = loop.steps
        for index in loop.inner:
            self._iteration[index] = 0
            self._remaining[index] = self.walk.loop_table[index].steps
            self._stopping.discard(index)
        for index in loop.nodes:
            self._phase[index] = _Phase.WAITING

        nodes = self.walk.nodes
        for edge, name in loop.cleared:
            del self._slots[nodes[name].index][edge]
        for pair in loop.restored:
            self._fill(nodes[pair[1]], pair, self._saved[pair, loop.index], loop.index)
        for pair, value in self._fed_back[loop.index].items():
            self._fill(nodes[pair[1]], pair, value, loop.index)
        for pair in [pair for pair in self._second if nodes[pair[1]].index in loop.nodes]:
            value = self._second.pop(pair)
            if pair in self.walk.external_inputs:
                self._fill(nodes[pair[1]], pair, value, 0)
        for index in loop.nodes:  # what sees the same inputs again
            self._check_ready(self.walk.node_table[index])

    def _is_running(self, loop: CompiledLoop) -> bool:
        """Whether it has begun, which is when something in it fired, and has not ended."""
        fired = any(self._phase[index] in (_Phase.FIRING, _Phase.FIRED) for index in loop.nodes)
        return self._remaining[loop.index] > 0 and (fired or self._iteration[loop.index] > 0)

    def _path(self, loop: int) -> tuple[int, ...]:
        return tuple([self._iteration[index] for index in self.walk.loop_table[loop].lineage])
