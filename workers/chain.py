"""One chain of walks, run: the dataflow of each walk, over this rank's nodes.

    Walk ──> WalkRun ──firing──┬──> CPU node:       a thread of the pool
                ▲              ├──> stateless node: the stateless engine
                │              └──> KV node:        a row of the engine (`workers.sequences`)
                ├──complete────────────┘    and the other ranks of the step are told
                ├──hear──────────────  what their nodes came to
                └──feed──────────────  the next chunk of a stream

Every rank of a step runs the whole chain and fires its own nodes (ADR 7); a step on one rank tells nobody
anything. An input that a walk is not given is what a walk before it put out under that name.

Values on edges are handles, and what never leaves this rank may be an array: nobody copies it. What a walk
results in is kept for the request; the rest is freed as soon as no rank can read it any more, by this rank's
own copy of the walk.

Knows neither the log nor other orders: chunks and edges go where it is told to put them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor as Pool
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from shared.errors import BugError, CapacityError
from shared.events import (
    EdgeEvent,
    NodeFired,
    NodeReady,
    OutputTotals,
    RowState,
    StreamTotals,
    TensorsReleased,
    WalkCall,
    WalkResult,
)
from shared.models.base import ChunkOf, EngineKind, ModelGraph, Processing
from shared.tensors import Handle
from shared.tracing import NOTHING, Span
from shared.walks import (
    EARLY,
    Chunk,
    Client,
    CompiledNode,
    CompiledWalk,
    Emission,
    Firing,
    Pair,
    StreamingEdge,
    WalkRun,
)
from workers.data_plane.port import INLINE_BYTES, Array, TensorStore
from workers.inbox import StepKey
from workers.outlet import Outlet
from workers.output import PostChunk
from workers.placed import PROMPT, Placed, Script
from workers.recall import Recalled
from workers.rows import Row, Rows
from workers.sequences import OnItem, Sequences
from workers.stateless.firing import Fired
from workers.streams import Streams
from workers.tensors import StepTensors, as_array, as_inline, copied
from workers.tracks import Tracks

MAX_EARLY: Final = 4096
"""So many firings of other ranks may wait for what they follow on."""
_TRACED: Final = ("prompt_tokens", "completion_tokens", "finish_reason")
"""What of a walk's facts its span tells: nothing that a client wrote."""

Value: TypeAlias = Handle | Array
Tell = Callable[[int, EdgeEvent], Coroutine[Any, Any, None]]
"""Tell a rank something, as soon as the log takes it."""


class StatelessPort(Protocol):
    """What a chain asks of the stateless engine (`workers.stateless.thread.StatelessThread`)."""

    async def fire(
        self,
        node: str,
        inputs: Mapping[str, Array],
        args: Mapping[str, Any],
        *,
        seed: int,
        path: tuple[int, ...],
        chunk: ChunkOf | None,
    ) -> Fired: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What this rank runs, loaded."""

    graph: ModelGraph
    processing: Processing
    rows: Rows
    pool: Pool
    store: TensorStore
    stateless: StatelessPort | None = None
    script: Script = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "script", Script(self.graph))


@dataclass(slots=True, kw_only=True)
class _Fired:
    """What a node of this rank came to; `row` is for the rank `to`."""

    outputs: Mapping[str, Value]
    streamed: Mapping[str, Value] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    row: RowState | None = None
    to: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Walking:
    """The walk that is run.

    Attributes:
        over: set when it is done, or cannot go on; None where nothing comes from outside of its tasks.
        early: firings of other ranks that are not due yet.
        feeding: streams of which a chunk is being made; `chunks` were made and not taken.
        kept: what this rank's nodes put into the walk's result.
    """

    place: int
    call: WalkCall
    walk: CompiledWalk
    run: WalkRun
    tasks: asyncio.TaskGroup
    over: "asyncio.Future[None] | None"
    early: list[tuple[NodeFired, int]] = field(default_factory=list)
    feeding: set[Pair] = field(default_factory=set)
    chunks: dict[Pair, Chunk] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


class Chain:
    """One order's walks, one after the other.

    Args:
        recalled: the output's tracks as the log has them.
        streams: the attempt's; None where the model has none.

    Attributes:
        tracks: what it puts out.
    """

    def __init__(
        self,
        hosted: Hosted,
        key: StepKey,
        ready: NodeReady,
        placed: Placed,
        *,
        recalled: Mapping[str, Recalled],
        post: PostChunk,
        tell: Tell,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        streams: Streams | None = None,
    ) -> None:
        self._hosted = hosted
        self._key = key
        self._ready = ready
        self._placed = placed
        self._tell = tell
        self._spawn = spawn
        self._streams = streams
        self._tensors = StepTensors(hosted.store, key, placed.rank)
        self.tracks = Tracks(key, placed.tracks, recalled, post, choice=_choice_of(ready))
        self._sequences = Sequences(
            key=key,
            ready=ready,
            placed=placed,
            processing=hosted.processing,
            engine_rows=hosted.rows,
            store=hosted.store,
            tensors=self._tensors,
            tracks=self.tracks,
            recalled=recalled,
            on_item=self._on_item,
            read=self._have_read,
        )
        self._values: dict[str, Any] = {}  # what walks put out, for those behind them
        self._walking: _Walking | None = None
        self._later: list[tuple[NodeFired, int]] = []  # of walks that have not begun here
        self._emitting: dict[int, Value] = {}
        self._outlets: dict[Pair, Outlet] = {}

    @property
    def rows(self) -> Mapping[str, Row]:
        """Its rows in the engine, by node."""
        return self._sequences.rows

    async def run(self, span: Span = NOTHING) -> tuple[list[WalkResult], dict[str, float]]:
        """Run all walks; what each came to, and how long it took. Each is a child of `span`."""
        clock = asyncio.get_running_loop().time
        results: list[WalkResult] = []
        durations_s: dict[str, float] = {}
        for place, call in enumerate(self._ready.walks):
            begun_s = clock()
            with span.child(f"walk {call.name}") as part:
                result = await self._walk(place, call)
                part.set({f"dalsegno.{name}": result.facts[name] for name in _TRACED if name in result.facts})
            results.append(result)
            durations_s[call.name] = durations_s.get(call.name, 0.0) + clock() - begun_s
            self._leave_streams(place)
        for stream in self._placed.ends:
            self._outlet(stream).end()
        return results, durations_s

    async def stored(self) -> dict[str, OutputTotals]:
        """Wait until all that was put out and streamed on is stored; what each track then amounts to."""
        totals = await self.tracks.stored()
        for outlet in self._outlets.values():
            await outlet.stored()
        return totals

    def taken(self) -> dict[str, StreamTotals]:
        """What came in on the streams that this rank's nodes of the step take."""
        if self._streams is None:
            return {}
        return {stream[0]: self._streams.totals(stream) for stream in self._taken_by(self._placed.walks)}

    def hear(self, event: NodeFired | TensorsReleased, rank: int) -> None:
        """Take what another rank of the step told."""
        if isinstance(event, TensorsReleased):
            self._tensors.returned(event.keys)
            return
        walking = self._walking
        if walking is None or event.walk > walking.place:
            self._later.append((event, rank))
        elif event.walk == walking.place:
            walking.early.append((event, rank))
            self._poke(walking)
        waiting = len(self._later) + (len(walking.early) if walking is not None else 0)
        if (
            waiting > MAX_EARLY
            and walking is not None
            and walking.over is not None
            and not walking.over.done()
        ):
            message = f"{MAX_EARLY} firings of other ranks wait for what they follow on; try again later"
            walking.over.set_exception(CapacityError(message))

    def close(self) -> None:
        """Put nothing out any more, and free everything."""
        self.tracks.close()
        self._tensors.close()

    # ---- walks -------------------------------------------------------------------------------------
    async def _walk(self, place: int, call: WalkCall) -> WalkResult:
        walk = self._placed.walks[place]
        # A step on one rank needs no list of its nodes: all are here.
        here = self._placed.here(walk) if self._placed.others else None
        run = WalkRun(walk, call.args, here)
        inputs = self._inputs(walk, call)
        run.start(inputs)
        if self._placed.others:
            self._note_prompts(place, inputs)
        walking: _Walking | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                walking = self._walking = self._begin(place, call, run, tasks)
                self._advance(walking)
                if walking.over is not None:
                    await walking.over
        except ExceptionGroup as group:
            raise _first(group) from None
        if not run.done:
            raise BugError(f"walk {call.name!r} came to a halt before its end")
        return WalkResult(name=call.name, facts=walking.facts, outputs=await self._kept(walking))

    def _begin(self, place: int, call: WalkCall, run: WalkRun, tasks: asyncio.TaskGroup) -> _Walking:
        # Only from outside can come what no task here waits for: other ranks' firings, items of streams.
        waits = bool(self._placed.others or run.walk.takers_of_streams)
        over = asyncio.get_running_loop().create_future() if waits else None
        walking = _Walking(place=place, call=call, walk=run.walk, run=run, tasks=tasks, over=over)
        if self._later:
            walking.early = [pair for pair in self._later if pair[0].walk == place]
            self._later = [pair for pair in self._later if pair[0].walk > place]
        return walking

    def _inputs(self, walk: CompiledWalk, call: WalkCall) -> dict[str, Any]:
        carried = {name: self._values[name] for name in walk.takers if name in self._values}
        return carried | call.inputs

    def _advance(self, walking: _Walking) -> None:
        """Do everything that can be done now."""
        if walking.early:
            self._hear_due(walking)
        while firings := walking.run.take_ready():
            for firing in firings:
                self._start(walking, self._fire(walking, firing))
            if not walking.early or not self._hear_due(walking):
                break
        if walking.walk.takers_of_streams:
            self._feed_what_waits(walking)
        if walking.over is not None and walking.run.done and not walking.over.done():
            walking.over.set_result(None)

    def _poke(self, walking: _Walking) -> None:
        """Something came from outside: go on, and where that fails, let the walk fail."""
        if walking.over is None or walking.over.done():
            return
        try:
            self._advance(walking)
        except Exception as error:  # noqa: BLE001 - it is the walk's, not the caller's
            walking.over.set_exception(error)

    def _start(self, walking: _Walking, work: Coroutine[Any, Any, None]) -> None:
        walking.tasks.create_task(self._task(walking, work))

    async def _task(self, walking: _Walking, work: Coroutine[Any, Any, None]) -> None:
        await work
        self._advance(walking)

    # ---- firings here ------------------------------------------------------------------------------
    async def _fire(self, walking: _Walking, firing: Firing) -> None:
        node = walking.walk.nodes[firing.node]
        kind, key = self._hosted.graph.nodes[firing.node], self._key_of(walking, firing)
        match kind:
            case EngineKind.CPU:
                fired = await self._on_cpu(walking, firing, key)
            case EngineKind.KV:
                fired = await self._on_row(walking, firing, key)
            case EngineKind.STATELESS:
                fired = await self._on_stateless(walking, firing, key)
        walking.facts |= fired.facts
        if fired.streamed:
            await self._stream(node, fired.streamed, key)
        emissions = walking.run.complete(firing, fired.outputs, fired.stops)
        assert emissions is not None, "a firing under way is completed once"
        self._tensors.on_edges([value for value in fired.outputs.values() if isinstance(value, Handle)])
        if self._placed.others:
            await self._tell_others(walking, firing, fired, key)
        if emissions:
            await self._leave(walking, emissions)
        self._let_go(walking)

    async def _on_cpu(self, walking: _Walking, firing: Firing, key: str) -> _Fired:
        node = walking.walk.nodes[firing.node]
        if node.streaming:
            await self._have_room(node)
        inputs = {name: await self._inline(name, value) for name, value in firing.inputs.items()}
        work = partial(self._hosted.processing.run, firing.node, key, inputs, walking.call.args)
        result = await asyncio.get_running_loop().run_in_executor(self._hosted.pool, work)
        outputs: dict[str, Value] = {
            name: handle for name, handle in result.outputs.items() if name not in node.streamed
        }
        if self._placed.others:
            for name, handle in result.outputs.items():
                if name in outputs and self._is_read_elsewhere(walking, node, name):
                    outputs[name] = await self._moved(handle)
        streamed = {edge.name for edge in node.streaming}
        items = {name: handle for name, handle in result.outputs.items() if name in streamed}
        return _Fired(outputs=outputs, streamed=items, facts=result.facts)

    async def _on_stateless(self, walking: _Walking, firing: Firing, key: str) -> _Fired:
        node, engine = walking.walk.nodes[firing.node], self._hosted.stateless
        if engine is None:
            raise BugError(f"node {firing.node!r} needs the stateless engine, which this rank has not")
        if node.streaming:
            await self._have_room(node)
        handles = [value for value in firing.inputs.values() if isinstance(value, Handle)]
        inputs = {name: await self._array(value) for name, value in firing.inputs.items()}
        fired = await engine.fire(
            firing.node,
            inputs,
            walking.call.args,
            seed=self._ready.seed,
            path=firing.path,
            chunk=self._chunk_of(walking, node),
        )
        self._tensors.check(handles)
        outputs = {
            name: await self._value(walking, node, name, f"{key}/{name}", array)
            for name, array in fired.outputs.items()
            if name not in node.streamed
        }
        streamed = {edge.name for edge in node.streaming}
        items = {name: array for name, array in fired.outputs.items() if name in streamed}
        return _Fired(outputs=outputs, streamed=items, facts=fired.facts, stops=fired.stops)

    async def _on_row(self, walking: _Walking, firing: Firing, key: str) -> _Fired:
        if any(isinstance(value, Array) for value in firing.inputs.values()):
            inputs = {name: await self._inline(name, value) for name, value in firing.inputs.items()}
            firing = Firing(firing.node, inputs, firing.path)
        came = await self._sequences.fire(walking.place, firing, key)
        return _Fired(outputs=came.outputs, facts=came.facts, stops=came.stops, row=came.row, to=came.to)

    @staticmethod
    def _chunk_of(walking: _Walking, node: CompiledNode) -> ChunkOf | None:
        """The chunk a firing takes: of its first streaming input, where it has several."""
        chunks = [walking.chunks.pop((stream, node.name)) for stream in node.streams]
        if not chunks:
            return None
        return ChunkOf(number=chunks[0].number, fresh=chunks[0].fresh, last=chunks[0].last)

    def _key_of(self, walking: _Walking, firing: Firing) -> str:
        """The prefix of the keys of what a firing puts out: request / attempt / step / walk / node.

        A walk that runs again in the same step has its place beside its name: no two tensors share a key.
        """
        request_id, attempt, step = self._key
        name, place = walking.walk.name, walking.place
        if any(walk.name == name for walk in self._placed.walks[:place]):
            name = f"{name}@{place}"
        return "/".join(map(str, (request_id, attempt, step, name, firing.node, *firing.path)))

    # ---- values ------------------------------------------------------------------------------------
    async def _inline(self, name: str, value: Value) -> Handle:
        if isinstance(value, Array):
            return await as_inline(name, value)
        return await self._tensors.inline(value)

    async def _array(self, value: Value) -> Array:
        return value if isinstance(value, Array) else await self._tensors.read(value)

    async def _value(self, walking: _Walking, node: CompiledNode, name: str, key: str, array: Array) -> Value:
        """What goes on an edge: the array itself, unless the walk's result or another rank needs a handle."""
        routes = [route for route in node.routes if route.edge == name]
        if all(isinstance(route.to, str | Client) for route in routes) and not (
            self._placed.others and self._is_read_elsewhere(walking, node, name)
        ):
            return array
        return await self._tensors.put(key, array)

    def _is_read_elsewhere(self, walking: _Walking, node: CompiledNode, name: str) -> bool:
        place = walking.place
        return any(
            self._placed.is_read_elsewhere(place, route) for route in node.routes if route.edge == name
        )

    async def _moved(self, handle: Handle) -> Handle:
        """A CPU node's output for another rank: from its event into the store, where it is not small."""
        if handle.data is None or len(handle.data) <= INLINE_BYTES:
            return handle
        return await self._tensors.put(handle.key, as_array(handle))

    async def _leave(self, walking: _Walking, emissions: Sequence[Emission]) -> None:
        """See to what leaves the walk."""
        for emission in emissions:
            self._values[emission.edge] = emission.value
            if not self._is_here(walking, emission.node):
                continue
            if not isinstance(emission.to, Client):
                walking.kept[emission.edge] = emission.value
            elif self._hosted.graph.nodes[emission.node] is not EngineKind.KV:
                # A row's tokens are put out as they come, not when its walk is told.
                for value in emission.value if isinstance(emission.value, list) else [emission.value]:
                    await self._put_out(emission.node, emission.to.modality, value)

    def _is_here(self, walking: _Walking, node: str) -> bool:
        if not self._placed.others:
            return True
        return self._placed.rank_of(walking.walk.name, node) == self._placed.rank

    async def _put_out(self, node: str, modality: str, value: Value) -> None:
        """A tensor as a client gets it: text as text, anything else as bytes with their type and shape."""
        self._emitting[id(value)] = value
        try:
            array = await self._array(value)
            data = await copied(array.data)
            if isinstance(value, Handle):
                self._tensors.check([value])
        finally:
            self._emitting.pop(id(value), None)
        if modality == "text":
            self.tracks.release(node, {"text": data.decode()})
            return
        media = self._hosted.graph.media.get(modality, {})
        metadata = {"dtype": array.dtype, "shape": list(array.shape), **media}
        self.tracks.release(node, {"modality": modality, "data": data, "metadata": metadata})

    async def _kept(self, walking: _Walking) -> dict[str, Handle]:
        """What a walk results in; the values of a list are told apart by their place: `name.0`, `name.1`."""
        kept: dict[str, Handle] = {}
        for name, value in walking.kept.items():
            if isinstance(value, list):
                listed = enumerate(value)
                kept |= {f"{name}.{place}": await self._tensors.keep(one) for place, one in listed}
            else:
                kept[name] = await self._tensors.keep(value)
        return kept

    def _let_go(self, walking: _Walking) -> None:
        """Free what nothing reads any more, on any rank."""
        if not self._tensors.holds:
            return
        later = {
            name: value
            for name, value in self._values.items()
            if any(name in walk.takers for walk in self._placed.walks[walking.place + 1 :])
        }
        alive = [
            *walking.run.alive(),
            *later.values(),
            *self._emitting.values(),
            *self._sequences.prompts.values(),
        ]
        self._tensors.keep_only({value.key for value in _flat(alive) if isinstance(value, Handle)})

    # ---- other ranks -------------------------------------------------------------------------------
    async def _tell_others(self, walking: _Walking, firing: Firing, fired: _Fired, key: str) -> None:
        node = walking.walk.nodes[firing.node]
        self._note_prompts(walking.place, fired.outputs, node)
        outputs = {name: self._told(f"{key}/{name}", value) for name, value in fired.outputs.items()}
        path = ".".join(map(str, (walking.place, firing.node, *firing.path)))
        for rank in self._placed.others:
            event = NodeFired(
                id=f"{self._key.request_id}.fired.{self._key.attempt}.{self._key.step}.{path}.{rank}",
                index=self._key.step,
                walk=walking.place,
                node=firing.node,
                path=firing.path,
                outputs=outputs,
                stops=[*fired.stops, *firing.ends],
                row=fired.row if rank == fired.to else None,
            )
            await self._tell(rank, event)

    @staticmethod
    def _told(key: str, value: Value) -> Handle:
        """A value as other ranks are told of it: of one that they do not read, its name."""
        if isinstance(value, Handle) and (value.data is None or len(value.data) <= INLINE_BYTES):
            return value
        return Handle(key=key, dtype=value.dtype, shape=value.shape)

    def _hear_due(self, walking: _Walking) -> bool:
        """Complete other ranks' firings as far as they are due; whether there were any."""
        heard = False
        changed = bool(walking.early)
        while changed:
            changed = False
            early, walking.early = walking.early, []
            for event, rank in early:
                if self._hear(walking, event, rank):
                    changed = heard = True
        if heard:
            self._let_go(walking)
        return heard

    def _hear(self, walking: _Walking, event: NodeFired, rank: int) -> bool:
        """Complete another rank's firing; False where it is a copy, or has to wait."""
        node = walking.walk.nodes.get(event.node)
        if node is not None and self._placed.rank_of(walking.walk.name, event.node) != rank:
            raise BugError(
                f"rank {rank} says that node {event.node!r} of walk {walking.walk.name!r} fired there, "
                f"but it is placed on rank {self._placed.rank_of(walking.walk.name, event.node)}"
            )
        emissions = walking.run.hear(event.node, event.path, event.outputs, event.stops)
        if emissions is EARLY:
            walking.early.append((event, rank))
            return False
        if emissions is None:
            return False
        assert node is not None, "the walk has heard it"
        if event.row is not None:
            self._sequences.arrive(event.node, rank, event.row)
        self._note_prompts(walking.place, event.outputs, node)
        own = [emission for emission in emissions if self._is_here(walking, emission.node)]
        self._values |= {emission.edge: emission.value for emission in emissions}
        if own:
            self._start(walking, self._leave(walking, own))
        return True

    def _note_prompts(
        self, place: int, values: Mapping[str, Any], source: CompiledNode | None = None
    ) -> None:
        """Remember what a row begins with that goes on at another rank: that rank has to know it too."""
        if PROMPT not in values:
            return
        walk = self._placed.walks[place]
        takers = (
            walk.takers.get(PROMPT, ())
            if source is None
            else [route.to for route in source.routes if route.edge == PROMPT and isinstance(route.to, str)]
        )
        for node in takers:
            if self._placed.moves(node) and self._placed.begins(node) == place:
                self._sequences.prompts[node] = values[PROMPT]

    def _have_read(self, rank: int, keys: Sequence[str]) -> None:
        """Tell the rank that owns them that tensors were read: a hint, and its loss is harmless."""
        name = f"{self._key.request_id}.released.{self._key.attempt}.{self._key.step}"
        event = TensorsReleased(
            id=f"{name}.{self._placed.rank}.{'.'.join(keys)}", index=self._key.step, keys=list(keys)
        )
        self._spawn(self._tell(rank, event))

    # ---- streams -----------------------------------------------------------------------------------
    def _feed_what_waits(self, walking: _Walking) -> None:
        assert self._streams is not None, "a model with streams has them"
        for stream in walking.run.wants():
            if stream in walking.feeding:
                continue
            if self._streams.ready(stream):
                walking.feeding.add(stream)
                self._start(walking, self._feed(walking, stream))
            else:
                self._streams.watch(stream, partial(self._poke, walking))

    async def _feed(self, walking: _Walking, stream: Pair) -> None:
        assert self._streams is not None
        chunk, array = await self._streams.chunk(stream)
        walking.feeding.discard(stream)
        walking.chunks[stream] = chunk
        fed = walking.run.feed(*stream, array, last=chunk.last)
        assert fed, "what was wanted is taken"

    def _leave_streams(self, place: int) -> None:
        """A walk is done: whoever feeds what no later one takes is held for it no more."""
        if self._streams is None:
            return
        walks = self._placed.walks
        later = self._taken_by(walks[place + 1 :])
        for stream in self._taken_by([walks[place]]):
            if stream not in later:
                self._streams.leave(stream, self._placed.feeders(stream))

    def _taken_by(self, walks: Sequence[CompiledWalk]) -> list[Pair]:
        """The streams that this rank's nodes take in these walks."""
        return [
            (name, node.name)
            for walk in walks
            for node in [walk.node_table[index] for index in walk.takers_of_streams]
            if self._placed.rank_of(walk.name, node.name) == self._placed.rank
            for name in node.streams
        ]

    def _outlet(self, stream: Pair) -> Outlet:
        assert self._streams is not None, "a model with streams has them"
        found = self._outlets.get(stream)
        if found is None:
            found = self._outlets[stream] = self._streams.outlet(stream, self._placed.taker(stream))
        return found

    async def _have_room(self, node: CompiledNode) -> None:
        for edge in node.streaming:
            await self._outlet((edge.name, edge.to)).room()

    async def _stream(self, node: CompiledNode, values: Mapping[str, Value], key: str) -> None:
        """Send what a firing came to as one item of each of its streams."""
        assert self._streams is not None
        for edge in node.streaming:
            if edge.name not in values:
                continue
            stream = (edge.name, edge.to)
            if self._outlet(stream).left:
                continue
            array = await self._array(values[edge.name])
            if _is_left_out(edge, array):
                continue
            taker = self._placed.taker(stream)
            items = await self._streams.item(f"{key}/{edge.name}.{edge.to}", array, taker)
            outlet = self._outlet(stream)
            outlet.add(items)
            if len(self._placed.feeders(stream)) > 1:
                await outlet.stored()  # the other feeder's items stand behind these in the log

    def _on_item(self, node: str) -> OnItem | None:
        """Where a row's tokens stream on: the first by the walk that begins it, the others by the last."""
        over = [walk.nodes[node] for walk in self._placed.walks if node in walk.nodes]
        first, later = over[0].streaming, over[-1].streaming
        if not first and not later:
            return None
        row = f"{self._key}.{node}"

        def on_item(token: int, place: int) -> None:
            for edge in later if place else first:
                if edge.takes(token):
                    self._outlet((edge.name, edge.to)).add_token(token, row)

        return on_item


def _choice_of(ready: NodeReady) -> int:
    """Which of several answers to one question the order is for."""
    return max((call.args.get("choice", 0) for call in ready.walks), default=0)


def _is_left_out(edge: StreamingEdge, array: Array) -> bool:
    """Whether an item is a number that the edge leaves out."""
    if edge.only is None or not array.dtype.startswith(("int", "uint")) or array.data.nbytes > 8:
        return False
    return not edge.takes(int.from_bytes(array.data.tobytes(), "little", signed=array.dtype[0] == "i"))


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group: the others came of it, or beside it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
