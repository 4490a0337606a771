"""The execution of one walk for one request: a state machine without I/O.

`deliver` adds an input value (`start` adds all). `take_ready` returns the nodes that can fire. `complete`
accepts the outputs of a firing, passes them on, and returns the values for the client or for the walk's
result. Values are opaque. A run holds only the state of its request; the compiled walk is shared.

The state depends on iterations and never on time. A firing is identified by its node and its path (the
iteration of each enclosing loop, outermost first), so a duplicate is not taken for the next iteration.
Loops iterate strictly: an iteration ends when everything in its body has fired, and the next one starts
with the next call of `take_ready`. A nested loop starts again in each iteration of the outer loop.

If a walk's nodes are on several ranks, each rank has a run of the whole walk. `take_ready` returns only the
firings of the rank's own nodes, and `complete_remote` adds the results of the others. All runs see the same
firings, and their state depends on nothing else, so they agree regardless of the order of arrival.

If a guard keeps an edge from sending, the input is *missing*, and a node with a missing input is skipped.
It is skipped once all its inputs are known to be present or missing, and takes nothing from a stream. A
skipped node sends nothing, so later nodes may be skipped as well. An optional input that a guard keeps away
is missing from the start of the iteration: its node does not wait for the one that would have sent it.

A loop emits nothing for an edge on which nothing was sent in any iteration. A loop in which nothing fired in
an iteration ends with it, because all later ones would be equal. A walk with guards starts when all its
inputs are present.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import msgspec

from shared.walks.compiled import CompiledLoop, CompiledNode, CompiledWalk, InputPort, Route
from shared.walks.errors import WalkError
from shared.walks.language import Keep, ToClient

Value: TypeAlias = Any
"""A value on an edge, which the run does not inspect."""


class Firing(msgspec.Struct, frozen=True):
    """One execution of a node, with its inputs.

    Attributes:
        ends: loops that its completion stops, because it takes the last chunk of a stream.
    """

    node: str
    inputs: dict[str, Value]
    path: tuple[int, ...]
    ends: tuple[str, ...] = ()


class Emission(msgspec.Struct, frozen=True):
    """A value that leaves the walk.

    Attributes:
        path: the path of the firing; for a value that a loop held, the iteration in which the loop ended.
    """

    edge: str
    to: ToClient | Keep
    value: Value
    node: str
    path: tuple[int, ...]


class NotDue(Enum):
    """The result of `complete_remote` for a firing that is not due yet."""

    NOT_DUE = auto()


NOT_DUE: Final = NotDue.NOT_DUE


class _Mark(Enum):
    MISSING = auto()


_MISSING: Final = _Mark.MISSING
"""Stands for a value that is missing in this iteration."""

_NONE: Final[frozenset[int]] = frozenset()


class _Phase(Enum):
    WAITING = auto()
    READY = auto()
    FIRING = auto()
    FIRED = auto()


class WalkRun:
    """One run of `walk`.

    Args:
        walk: the compiled walk.
        args: the walk's arguments, some of which are a loop's `max_iters`.
        here: the nodes that this rank fires; other ranks fire the others. None means all nodes.

    Attributes:
        done: everything has fired as often as it should.
        outputs: the walk's results by name; of a value that a loop held, its last iteration's.
        accumulated: the walk's results that are lists, by name, in the order of iterations.
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
        self._turning: list[int] = []  # loops whose iteration has ended and whose next one has not started
        self._phase = [_Phase.WAITING] * len(nodes)
        self._ready: list[int] = []
        self._active = [False] * len(loops)  # something fired in the iteration; used with guards only
        self._last: set[int] = set()  # nodes that were fed the last chunk of a stream
        self._slots: list[dict[str, Value]] = [{} for _ in nodes]
        self._second: dict[InputPort, Value] = {}  # second deliveries, for the next iteration
        self._fed_back: list[dict[InputPort, Value]] = [{} for _ in loops]  # for the loop's next iteration
        self._held: dict[tuple[int, int], Value] = {}  # by route and position in its holds
        self._saved: dict[tuple[InputPort, int], Value] = {}  # by the loop that restores it
        self._awaited = len(walk.inputs) if walk.guarded else 0  # so that no input arrives after a skip
        if self._guarded:
            self._note_missing(loops)
        for node in nodes:  # nodes without inputs are ready
            self._check_ready(node, [])

    # ---- inputs ------------------------------------------------------------------------------------
    def start(self, inputs: Mapping[str, Value]) -> None:
        """Deliver every input of the walk, by name, to all nodes that take it.

        Raises:
            WalkError: `inputs` are not exactly the walk's inputs; nothing was delivered.
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
        """Add one input value. Return False if it is refused, without any change.

        A second value is for the node's next iteration, and is dropped then if the walk itself feeds that. A
        third value is refused, and so are unknown inputs, and all values once the walk is done.
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

    # ---- firings -----------------------------------------------------------------------------------
    def take_ready(self) -> list[Firing]:
        """Return the firings that are ready, each one once, in the order of the nodes in the walk."""
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
        """Pass on the outputs of a firing; return the values that leave the walk, in order.

        The loops in `stops` and in the firing's `ends` end after the current iteration. Returns None,
        without any change, for a firing that is not running (it may be a duplicate).

        Raises:
            WalkError: the outputs are not exactly the declared ones, or `stops` has a loop that does not
                enclose the node; nothing changed.
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
        """Complete a firing of another rank; return the values that leave the walk, in order.

        The rank that fired the node sends the client's values; each emission names its node. Returns None
        for a duplicate, and `NOT_DUE`, without any change, for a firing that is not due yet: try again
        after the next completed firing or the next input.

        Raises:
            WalkError: no other rank can fire this (the node is unknown or fires here, or the walk is done
                without it), or as in `complete`; nothing changed.
        """
        found = self._remote_node(node, path)
        now = self._path(found.loop)
        if path > now and self._turning:  # a firing in an iteration means that the iteration has started
            self._turn()
            now = self._path(found.loop)
        phase = self._phase[found.index]
        if path == now and phase is _Phase.FIRING and not self._awaited:
            return self._fired(found, outputs, stops)
        if path < now or (path == now and phase is _Phase.FIRED):
            return None
        if self.done:
            raise WalkError(
                f"walk {self.walk.name!r}: node {node!r} fired on another rank at {path}, but here the "
                f"walk is done, with {now} as its last path; the ranks disagree about the firings"
            )
        return NOT_DUE

    def stop(self, loop: str) -> list[Emission] | None:
        """End a loop after its current iteration; return the values that leave the walk, in order.

        Between two iterations the loop ends at once. Returns None if the loop is not running.

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
        """Return the stream inputs that a node of this rank waits for with all its other inputs present.

        Call it after `take_ready`, which starts the iteration.
        """
        table = self.walk.node_table
        return [
            (edge, table[index].name)
            for index in self.walk.stream_consumers
            for edge in self._open_streams(table[index])
        ]

    def feed(self, edge: str, node: str, value: Value, *, last: bool = False) -> bool:
        """Give a node the next chunk of a stream. Return False, without any change, if it is not awaited.

        The firing that takes a `last` chunk ends the loop around the node.
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

    # ---- liveness of values ------------------------------------------------------------------------
    def live_values(self) -> list[Value]:
        """Return every value that may still be read on any rank, or is a result; lists are flattened.

        A value may appear several times. Values that went to the client are not included.
        """
        found: list[Value] = [*self.outputs.values(), *self.accumulated.values()]
        if not self.done:
            found += self._second.values()
            found += self._held.values()
            for loop, fed in enumerate(self._fed_back):
                if fed and self._may_iterate(loop):
                    found += fed.values()
            found += (value for (_, loop), value in self._saved.items() if self._may_iterate(loop))
            for node in self.walk.node_table:
                found += self._unread_inputs(node)
        return [value for value in _flat(found) if value is not _MISSING]

    def _unread_inputs(self, node: CompiledNode) -> list[Value]:
        """Return the inputs of a node that its current firing reads, or its next one if it has fired."""
        slots = self._slots[node.index]
        if self._phase[node.index] is not _Phase.FIRED:
            return [*slots.values()]
        lineage = self.walk.loop_table[node.loop].lineage
        again = next((loop for loop in reversed(lineage) if self._may_iterate(loop)), 0)
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

    def _may_iterate(self, loop: int) -> bool:
        """Return whether another iteration of this loop may follow the current one."""
        if loop in self._turning:
            return True
        is_last = loop in self._stopping or self._iteration[loop] + 1 == self._max_iters[loop]
        return self._remaining[loop] > 0 and not is_last

    # ---- values ------------------------------------------------------------------------------------
    def _fired(
        self, node: CompiledNode, outputs: Mapping[str, Value], stops: Collection[str]
    ) -> list[Emission]:
        """Apply the outputs of a firing."""
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
        """Return the routes on which a firing node sends nothing because of their guards."""
        iteration, routes = self._iteration[node.loop], node.routes
        closed = [it.index for it in routes if it.when is not None and not it.when(iteration, self.args)]
        for loop in self.walk.loop_table[node.loop].lineage:
            self._active[loop] = True
        return frozenset(closed)

    def _send(self, route: Route, hold: int, value: Value, emissions: list[Emission]) -> None:
        """Send a value from position `hold` of its route to the next loop that holds it, or to its end."""
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
        """Mark the input at the end of a route as missing in this iteration."""
        if hold == len(route.holds) and isinstance(route.to, str) and not route.back:
            node = self.walk.nodes[route.to]
            self._put(node, (route.edge, route.to), _MISSING, route.loop)
            self._check_ready(node, emissions)

    def _note_missing(self, loops: Iterable[CompiledLoop]) -> None:
        """Mark the optional inputs that guards keep away in the iteration that starts."""
        for loop in loops:
            for route in loop.dispensable:
                if route.when is not None and not route.when(self._iteration[loop.index], self.args):
                    assert isinstance(route.to, str)
                    self._put(self.walk.nodes[route.to], (route.edge, route.to), _MISSING, route.loop)

    def _skip(self, node: CompiledNode, emissions: list[Emission]) -> None:
        self._phase[node.index] = _Phase.FIRED
        for route in node.routes:
            self._send_nothing(route, 0, emissions)
        self._step_done(node.loop, emissions)

    def _put(self, node: CompiledNode, pair: InputPort, value: Value, loop: int) -> None:
        """Set an input for the current iteration of `loop`."""
        self._slots[node.index][pair[0]] = value
        for restorer in self.walk.restorers.get(pair, ()):
            if restorer >= loop:  # the loop itself or an inner one: indices grow along a lineage
                self._saved[pair, restorer] = value

    def _check_ready(self, node: CompiledNode, emissions: list[Emission]) -> None:
        if self._phase[node.index] is not _Phase.WAITING:
            return
        present = len(self._slots[node.index])
        if self._guarded and present >= len(node.inputs) and self._lacks_input(node):
            self._skip(node, emissions)
        elif self._here is None or node.index in self._here:
            if present == node.input_count:
                self._phase[node.index] = _Phase.READY
                self._ready.append(node.index)
        elif present == len(node.inputs):  # its streams are fed on the other rank
            self._phase[node.index] = _Phase.FIRING

    def _lacks_input(self, node: CompiledNode) -> bool:
        """Return whether a required value is missing, once all values are present or missing."""
        slots = self._slots[node.index]
        return any(slots[edge] is _MISSING and edge not in node.optional for edge in node.inputs)

    # ---- loops -------------------------------------------------------------------------------------
    def _step_done(self, index: int, emissions: list[Emission]) -> None:
        """Note that a node or loop directly in this loop's body is done for this iteration."""
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
        """End a loop and release the values it held. Its feedback for a next iteration is not used."""
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
        """Start the next iteration of every loop that waits for it."""
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
            self._slots[nodes[name].index].pop(edge, None)  # a skipped node took nothing from a stream
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
            self._note_missing([self.walk.loop_table[index] for index in (loop.index, *loop.inner)])
        emissions: list[Emission] = []
        for index in loop.nodes:
            self._check_ready(self.walk.node_table[index], emissions)
        # A node that lacks an input from outside of the loop is skipped again. Only firings emit values, and
        # there was none; and the node that fired first in the previous iteration can fire again.
        assert not emissions, "a skipped node emits nothing"
        assert self._remaining[loop.index], "an iteration without a firing is the last one"

    def _take_second(self, loop: CompiledLoop) -> None:
        """Use the second deliveries in the iteration that starts."""
        nodes = self.walk.nodes
        for pair in [pair for pair in self._second if nodes[pair[1]].index in loop.nodes]:
            value = self._second.pop(pair)
            if pair in self.walk.external_inputs:
                self._put(nodes[pair[1]], pair, value, 0)

    def _is_running(self, loop: CompiledLoop) -> bool:
        """Return whether a loop has started (something in it fired) and has not ended."""
        fired = any(self._phase[index] in (_Phase.FIRING, _Phase.FIRED) for index in loop.nodes)
        return self._remaining[loop.index] > 0 and (fired or self._iteration[loop.index] > 0)

    def _path(self, loop: int) -> tuple[int, ...]:
        return tuple([self._iteration[index] for index in self.walk.loop_table[loop].lineage])

    # ---- ranks -------------------------------------------------------------------------------------
    def _is_here(self, node: CompiledNode) -> bool:
        return self._here is None or node.index in self._here

    def _remote_node(self, name: str, path: tuple[int, ...]) -> CompiledNode:
        """Return the node `name` after a check that another rank fires it and that `path` fits it."""
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
                f"walk {self.walk.name!r}: expected a path of node {name!r} with the iterations of the loops "
                f"{loops}, found {path}"
            )
        return node

    # ---- checks of a firing ------------------------------------------------------------------------
    def _check_outputs(self, node: CompiledNode, outputs: Mapping[str, Value]) -> None:
        streamed = node.streamed
        if not node.outputs <= outputs.keys() <= node.outputs | streamed:
            may = f", and may produce {sorted(streamed)} for streams" if streamed else ""
            raise WalkError(
                f"walk {self.walk.name!r}: node {node.name!r} must produce {sorted(node.outputs)}{may}, "
                f"found {sorted(outputs)}"
            )

    def _around(self, node: CompiledNode, loop: str) -> int:
        """Return the index of a loop after a check that a firing of `node` may stop it."""
        found = self.walk.loops.get(loop)
        around = self.walk.loop_table[node.loop].lineage
        if found is None or found.index not in around:
            names = [self.walk.loop_table[index].name for index in around]
            raise WalkError(
                f"walk {self.walk.name!r}: a firing of node {node.name!r} cannot stop loop {loop!r}, which "
                f"does not enclose it: the iteration would be ambiguous; the enclosing loops are {names}"
            )
        return found.index


def _flat(values: list[Value]) -> Iterator[Value]:
    """Yield the values, with lists flattened."""
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value
