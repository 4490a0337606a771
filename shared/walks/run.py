"""One request on its way through one walk: a state machine without I/O.

Values come in by `deliver` (or all at once by `start`); `take_ready` hands out the nodes that can fire;
`complete` takes what a firing produced, sends it on, and returns what is released to the client or kept.
Values are opaque. The run holds only what is this request's own; the walk is shared.

Everything is counted by iterations, never by time. A firing is known by its node and its path (the
iteration of each loop around it, outermost first), so a duplicate is a duplicate and not the next
iteration. Loops iterate strictly: an iteration ends when everything in its body has fired, and the next
begins when `take_ready` is called next. Nested loops begin anew in each iteration of the outer one.

Where a walk's nodes are on several ranks, each rank has a run of the whole walk. It is handed out the
firings of its own nodes alone, and hears (`hear`) what the others' came to. All runs see the same firings,
and what follows from one depends on nothing else, so they agree, in whatever order they hear.

What a guard keeps from being sent leaves an input *missing*, and a node with a missing input is skipped:
when it is known of all its inputs whether they come, and without taking anything from a stream. A skipped
node sends nothing, so the nodes behind it may be skipped as well, and out of a loop comes nothing where
nothing was sent in any of its iterations. A loop of which nothing fired in an iteration ends with it: all
others would be the same. A walk with guards begins when all its inputs are there.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import msgspec

from shared.walks.compiled import CompiledLoop, CompiledNode, CompiledWalk, InputPort, Route
from shared.walks.errors import WalkError
from shared.walks.language import Keep, ToClient

Value: TypeAlias = Any
"""Whatever travels on an edge: the run never looks into it."""


class Firing(msgspec.Struct, frozen=True):
    """An order to run a node: once, with these inputs.

    Attributes:
        ends: loops that its completion stops by itself, for it takes the last chunk of a stream.
    """

    node: str
    inputs: dict[str, Value]
    path: tuple[int, ...]
    ends: tuple[str, ...] = ()


class Emission(msgspec.Struct, frozen=True):
    """A value that leaves the walk.

    `path` is that of the firing, or, for what a loop held, of the iteration the loop ended in.
    """

    edge: str
    to: ToClient | Keep
    value: Value
    node: str
    path: tuple[int, ...]


class NotDue(Enum):
    """The answer to a firing that is not due yet."""

    NOT_DUE = auto()


NOT_DUE: Final = NotDue.NOT_DUE


class _Mark(Enum):
    MISSING = auto()


_MISSING: Final = _Mark.MISSING
"""In the place of a value that does not come in this iteration."""

_NONE: Final[frozenset[int]] = frozenset()


class _Phase(Enum):
    WAITING = auto()
    READY = auto()
    FIRING = auto()
    FIRED = auto()


class WalkRun:
    """One run of `walk`; `args` are the walk's arguments, of which loops take their `max_iters`.

    `here` are the nodes whose firings are handed out; other ranks fire the others. None: all of them.

    Attributes:
        done: everything has fired, as often as it should.
        outputs: what was kept, by name: where a loop held it, the value of its last iteration.
        accumulated: what was kept as a list, by name, in the order of iterations.
    """

    def __init__(
        self,
        walk: CompiledWalk,
        args: Mapping[str, Any] | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        self.walk = walk
        self.args = args or {}
        self.done = False
        self.outputs: dict[str, Value] = {}
        self.accumulated: dict[str, list[Value]] = {}
        loops, nodes = walk.loop_table, walk.node_table
        self._guarded = walk.guarded
        self._here = None if here is None else frozenset(node.index for node in nodes if node.name in here)
        self._max_iters = walk.max_iters(self.args)
        self._iteration = [0] * len(loops)
        self._remaining = [loop.steps for loop in loops]
        self._stopping: set[int] = set()
        self._turning: list[int] = []  # loops: their iteration has ended, the next is to begin
        self._phase = [_Phase.WAITING] * len(nodes)
        self._ready: list[int] = []
        self._active = [False] * len(loops)  # something fired in the iteration; kept where there are guards
        self._last: set[int] = set()  # nodes that were fed the last chunk of a stream
        self._slots: list[dict[str, Value]] = [{} for _ in nodes]
        self._second: dict[InputPort, Value] = {}  # delivered again: for the next iteration
        self._fed_back: list[dict[InputPort, Value]] = [{} for _ in loops]  # for the loop's next iteration
        self._held: dict[tuple[int, int], Value] = {}  # by route and place in its holds
        self._saved: dict[tuple[InputPort, int], Value] = {}  # by the loop that restores it
        self._awaited = len(walk.inputs) if walk.guarded else 0  # so that no input comes behind a skip
        for node in nodes:  # what takes no inputs
            self._check_ready(node, [])

    # ---- in ----------------------------------------------------------------------------------------
    def start(self, inputs: Mapping[str, Value]) -> None:
        """Deliver every input of the walk, by name, to all that take it.

        Raises:
            WalkError: not exactly the inputs the walk takes; nothing was delivered.
        """
        consumers = self.walk.consumers
        if inputs.keys() != consumers.keys():
            raise WalkError(
                f"walk {self.walk.name!r} takes the inputs {sorted(consumers)}, found {sorted(inputs)}"
            )
        for edge, value in inputs.items():
            for node in consumers[edge]:
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
            self._put(target, pair, value, 0)
            if self._awaited:
                self._awaited -= 1
            self._check_ready(target, [])
        return True

    # ---- out ---------------------------------------------------------------------------------------
    def take_ready(self) -> list[Firing]:
        """The nodes that can fire now, each firing once, in the order the walk was written."""
        if self._awaited:
            return []
        if self._turning:
            self._turn()
        firings = []
        for index in sorted(self._ready):
            self._phase[index] = _Phase.FIRING
            node, inputs = self.walk.node_table[index], dict(self._slots[index])
            if node.optional:
                inputs = {name: value for name, value in inputs.items() if value is not _MISSING}
            path = self._path(node.loop)
            if index in self._last:
                self._last.remove(index)
                firings.append(Firing(node.name, inputs, path, (self.walk.loop_table[node.loop].name,)))
            else:
                firings.append(Firing(node.name, inputs, path))
        self._ready.clear()
        return firings

    def complete(
        self, firing: Firing, outputs: Mapping[str, Value], stops: Collection[str] = ()
    ) -> list[Emission] | None:
        """Send on what a firing produced; what leaves the walk by it, in order.

        The loops in `stops` and in the firing's `ends` end after the iteration under way.

        None: refused, and nothing changed, for this firing is not under way (it may be a duplicate).

        Raises:
            WalkError: not exactly the outputs the node declares, or a stop of a loop that is not around
                it; nothing changed.
        """
        node = self.walk.nodes.get(firing.node)
        if (
            node is None
            or self._phase[node.index] is not _Phase.FIRING
            or firing.path != self._path(node.loop)
            or (self._here is not None and node.index not in self._here)
        ):
            return None
        return self._fired(node, outputs, (*firing.ends, *stops) if firing.ends else stops)

    def complete_remote(
        self, node: str, path: tuple[int, ...], outputs: Mapping[str, Value], stops: Collection[str] = ()
    ) -> list[Emission] | NotDue | None:
        """Complete a firing of another rank; what leaves the walk by it, in order.

        Of what leaves, the node's own rank sees to what goes to the client; an emission names the node.

        None: a duplicate. `NOT_DUE`: it is not due yet; nothing changed for it, so ask again after the next
        firing that was completed or heard, or the next input.

        Raises:
            WalkError: no other rank can fire this (the node is none of this walk, or is fired here; the
                walk is done without it), or what `complete` raises; nothing changed.
        """
        found = self._elsewhere(node, path)
        now = self._path(found.loop)
        if path > now and self._turning:  # whoever fires in an iteration has begun it
            self._turn()
            now = self._path(found.loop)
        phase = self._phase[found.index]
        if path == now and phase is _Phase.FIRING and not self._awaited:
            return self._fired(found, outputs, stops)
        if path < now or (path == now and phase is _Phase.FIRED):
            return None
        if self.done:
            raise WalkError(
                f"walk {self.walk.name!r}: node {node!r} fired on another rank in {path}, but here the "
                f"walk is done, with {now} as its last; the ranks do not agree on what happened"
            )
        return NOT_DUE

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

    # ---- streams -----------------------------------------------------------------------------------
    def awaited_streams(self) -> list[InputPort]:
        """The streaming inputs that a node waits for, here and now: everything else it takes is there.

        Ask after `take_ready`, which begins the iteration at hand.
        """
        table = self.walk.node_table
        return [
            (edge, table[index].name)
            for index in self.walk.stream_consumers
            for edge in self._open_streams(table[index])
        ]

    def feed(self, edge: str, node: str, value: Value, *, last: bool = False) -> bool:
        """Give a node the next chunk of a stream; False: refused, and nothing changed, for it is not wanted.

        The firing that takes a `last` one ends the loop around the node.
        """
        found = self.walk.nodes.get(node)
        if found is None or edge not in self._open_streams(found):
            return False
        self._slots[found.index][edge] = value
        if last and found.loop:
            self._last.add(found.index)
        self._check_ready(found, [])
        return True

    def _open_streams(self, node: CompiledNode) -> list[str]:
        slots = self._slots[node.index]
        waits = self._phase[node.index] is _Phase.WAITING and self._is_here(node)
        if not waits or any(edge not in slots for edge in node.inputs):
            return []
        return [edge for edge in node.streams if edge not in slots]

    # ---- memory ------------------------------------------------------------------------------------
    def live_values(self) -> list[Value]:
        """Every value that may still be read, on any rank, or is kept; one that is listed stands for each.

        A value may be there several times. What went to the client is not the run's any more.
        """
        found: list[Value] = [*self.outputs.values(), *self.accumulated.values()]
        if not self.done:
            found += self._second.values()
            found += self._held.values()
            for loop, fed in enumerate(self._fed_back):
                if fed and self._goes_on(loop):
                    found += fed.values()
            found += (value for (_, loop), value in self._saved.items() if self._goes_on(loop))
            for node in self.walk.node_table:
                found += self._read_again(node)
        return [value for value in _flat(found) if value is not _MISSING]

    def _read_again(self, node: CompiledNode) -> list[Value]:
        """The inputs of a node that its firing at hand reads, or, once it has fired, the next one."""
        slots = self._slots[node.index]
        if self._phase[node.index] is not _Phase.FIRED:
            return [*slots.values()]
        lineage = self.walk.loop_table[node.loop].lineage
        again = next((loop for loop in reversed(lineage) if self._goes_on(loop)), 0)
        if not again:
            return []
        loop, fed = self.walk.loop_table[again], self._fed_back[again]
        return [
            value
            for edge, value in slots.items()
            if (pair := (edge, node.name)) not in fed
            and pair not in loop.cleared
            and pair not in loop.restored
        ]

    def _goes_on(self, loop: int) -> bool:
        """Whether another iteration of this loop may follow the one at hand."""
        if loop in self._turning:
            return True
        is_last = loop in self._stopping or self._iteration[loop] + 1 == self._max_iters[loop]
        return self._remaining[loop] > 0 and not is_last

    # ---- values ------------------------------------------------------------------------------------
    def _fired(
        self, node: CompiledNode, outputs: Mapping[str, Value], stops: Collection[str]
    ) -> list[Emission]:
        """A firing came to `outputs`."""
        if outputs.keys() != node.outputs:
            self._check_outputs(node, outputs)
        stopping = [self._around(node, loop) for loop in stops] if stops else ()
        closed = self._closed(node) if self._guarded else _NONE
        if stopping:
            self._stopping.update(stopping)
        self._phase[node.index] = _Phase.FIRED
        emissions: list[Emission] = []
        for route in node.routes:
            if closed and route.index in closed:
                self._send_nothing(route, 0, emissions)
            else:
                self._send(route, 0, outputs[route.edge], emissions)
        self._step_done(node.loop, emissions)
        return emissions

    def _closed(self, node: CompiledNode) -> frozenset[int]:
        """The routes of a node that fires on which it sends nothing, for their guards say so."""
        iteration, routes = self._iteration[node.loop], node.routes
        closed = [it.index for it in routes if it.when is not None and not it.when(iteration, self.args)]
        for loop in self.walk.loop_table[node.loop].lineage:
            self._active[loop] = True
        return frozenset(closed)

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
                node = self.walk.nodes[route.to]
                self._put(node, pair, value, route.loop)
                self._check_ready(node, emissions)
            return
        emissions.append(Emission(route.edge, route.to, value, route.source, self._path(route.loop)))
        if isinstance(route.to, Keep):
            listed = any(accumulates for _, accumulates in route.holds)
            (self.accumulated if listed else self.outputs)[route.edge] = value

    def _send_nothing(self, route: Route, hold: int, emissions: list[Emission]) -> None:
        """No value comes on this route in this iteration: an input in it misses."""
        if hold == len(route.holds) and isinstance(route.to, str) and not route.back:
            node = self.walk.nodes[route.to]
            self._put(node, (route.edge, route.to), _MISSING, route.loop)
            self._check_ready(node, emissions)

    def _skip(self, node: CompiledNode, emissions: list[Emission]) -> None:
        self._phase[node.index] = _Phase.FIRED
        for route in node.routes:
            self._send_nothing(route, 0, emissions)
        self._step_done(node.loop, emissions)

    def _put(self, node: CompiledNode, pair: InputPort, value: Value, loop: int) -> None:
        """Fill an input with the value it has in the present iteration of `loop`."""
        self._slots[node.index][pair[0]] = value
        for restorer in self.walk.restorers.get(pair, ()):
            if restorer >= loop:  # the loop, or further in: along one lineage, indices rise
                self._saved[pair, restorer] = value

    def _check_ready(self, node: CompiledNode, emissions: list[Emission]) -> None:
        if self._phase[node.index] is not _Phase.WAITING:
            return
        there = len(self._slots[node.index])
        if self._guarded and there >= len(node.inputs) and self._misses(node):
            self._skip(node, emissions)
        elif self._here is None or node.index in self._here:
            if there == node.input_count:
                self._phase[node.index] = _Phase.READY
                self._ready.append(node.index)
        elif there == len(node.inputs):  # its streams are the other rank's business
            self._phase[node.index] = _Phase.FIRING

    def _misses(self, node: CompiledNode) -> bool:
        """Whether one of its values, all of which are settled, is missing, and it cannot do without."""
        slots = self._slots[node.index]
        return any(slots[edge] is _MISSING and edge not in node.optional for edge in node.inputs)

    # ---- loops -------------------------------------------------------------------------------------
    def _step_done(self, index: int, emissions: list[Emission]) -> None:
        """A node or loop directly in this loop's body is done for this iteration."""
        self._remaining[index] -= 1
        if self._remaining[index]:
            return
        if (
            self._iteration[index] + 1 == self._max_iters[index]
            or index in self._stopping
            or (self._guarded and not self._active[index])
        ):
            self._end(self.walk.loop_table[index], emissions)
        else:
            self._turning.append(index)

    def _end(self, loop: CompiledLoop, emissions: list[Emission]) -> None:
        """Release what the loop held. What it fed back for a next iteration is never asked for."""
        if loop.index == 0:
            self.done = True
            return
        for route, hold in loop.exits:
            value = self._held.pop((route.index, hold), _MISSING)
            if value is _MISSING:
                self._send_nothing(route, hold + 1, emissions)
            else:
                self._send(route, hold + 1, value, emissions)
        self._step_done(loop.parent, emissions)

    def _turn(self) -> None:
        """Begin the next iteration of every loop that waits for it."""
        for loop in self._turning:
            self._begin_iteration(self.walk.loop_table[loop])
        self._turning.clear()

    def _begin_iteration(self, loop: CompiledLoop) -> None:
        self._iteration[loop.index] += 1
        self._remaining[loop.index] = loop.steps
        fed = self._fed_back[loop.index]
        for index in loop.inner:
            self._iteration[index] = 0
            self._remaining[index] = self.walk.loop_table[index].steps
            self._stopping.discard(index)
            self._fed_back[index].clear()
        for index in loop.nodes:
            self._phase[index] = _Phase.WAITING

        nodes = self.walk.nodes
        for edge, name in loop.cleared:
            self._slots[nodes[name].index].pop(edge, None)  # a skipped node has taken nothing from a stream
        for pair in loop.restored:
            self._put(nodes[pair[1]], pair, self._saved[pair, loop.index], loop.index)
        for pair, value in fed.items():
            self._put(nodes[pair[1]], pair, value, loop.index)
        fed.clear()
        if self._second:
            self._take_second(loop)
        if self._guarded:
            for index in (loop.index, *loop.inner):
                self._active[index] = False
        emissions: list[Emission] = []
        for index in loop.nodes:
            self._check_ready(self.walk.node_table[index], emissions)
        # What misses an input from outside of the loop is skipped again. What leaves a walk comes of a
        # firing, and there was none; and whatever fired first in the iteration before can fire again.
        assert not emissions, "a skip puts nothing out"
        assert self._remaining[loop.index], "an iteration in which nothing fires is the last"

    def _take_second(self, loop: CompiledLoop) -> None:
        """Take what was delivered again for the iteration that begins."""
        nodes = self.walk.nodes
        for pair in [pair for pair in self._second if nodes[pair[1]].index in loop.nodes]:
            value = self._second.pop(pair)
            if pair in self.walk.external_inputs:
                self._put(nodes[pair[1]], pair, value, 0)

    def _is_running(self, loop: CompiledLoop) -> bool:
        """Whether it has begun, which is when something in it fired, and has not ended."""
        fired = any(self._phase[index] in (_Phase.FIRING, _Phase.FIRED) for index in loop.nodes)
        return self._remaining[loop.index] > 0 and (fired or self._iteration[loop.index] > 0)

    def _path(self, loop: int) -> tuple[int, ...]:
        return tuple([self._iteration[index] for index in self.walk.loop_table[loop].lineage])

    # ---- ranks -------------------------------------------------------------------------------------
    def _is_here(self, node: CompiledNode) -> bool:
        return self._here is None or node.index in self._here

    def _elsewhere(self, name: str, path: tuple[int, ...]) -> CompiledNode:
        """The node `name`, which another rank fires, where `path` can be one of its firings."""
        node = self.walk.nodes.get(name)
        if node is None or self._is_here(node):
            here = sorted(name for name, node in self.walk.nodes.items() if self._is_here(node))
            raise WalkError(
                f"walk {self.walk.name!r}: no other rank fires node {name!r}; the nodes are "
                f"{sorted(self.walk.nodes)}, of which {here} fire here"
            )
        loops = [self.walk.loop_table[index].name for index in self.walk.loop_table[node.loop].lineage]
        if len(path) != len(loops):
            raise WalkError(
                f"walk {self.walk.name!r}: a path of node {name!r} has the iterations of the loops {loops}, "
                f"found {path}"
            )
        return node

    # ---- what a firing may say ---------------------------------------------------------------------
    def _check_outputs(self, node: CompiledNode, outputs: Mapping[str, Value]) -> None:
        streamed = node.streamed
        if not node.outputs <= outputs.keys() <= node.outputs | streamed:
            may = f", and may produce {sorted(streamed)} for streams" if streamed else ""
            raise WalkError(
                f"walk {self.walk.name!r}: node {node.name!r} must produce {sorted(node.outputs)}{may}, "
                f"found {sorted(outputs)}"
            )

    def _around(self, node: CompiledNode, loop: str) -> int:
        """The index of a loop that a firing of `node` may stop."""
        found = self.walk.loops.get(loop)
        around = self.walk.loop_table[node.loop].lineage
        if found is None or found.index not in around:
            names = [self.walk.loop_table[index].name for index in around]
            raise WalkError(
                f"walk {self.walk.name!r}: a firing of node {node.name!r} cannot stop loop {loop!r}, which "
                f"is not around it: other ranks could not tell in which iteration; around it are {names}"
            )
        return found.index


def _flat(values: list[Value]) -> Iterator[Value]:
    """The values, with those of a list one by one."""
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value
