"""One chain of walks, run: the dataflow of each walk, over this rank's nodes.

    Walk ──> WalkRun ──firing──> its node (`workers.execution.node_executor`)
                ▲                    │
                ├──complete──────────┴──> the other ranks of the step are told
                ├──hear───── what their nodes came to
                └──feed───── the next chunk of a stream

Every rank of a step runs the whole chain and fires its own nodes (ADR 7); a step on one rank tells nobody
anything. An input that a walk is not given is what a walk before it put out under that name.

What a walk results in is kept for the request; every other tensor is freed as soon as no rank can read it any
more, by this rank's own copy of the walk.

Knows neither the log nor other orders: chunks and edges go where it is told to put them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from models.base import ChunkOf, EngineKind
from shared.errors import BugError, CapacityError
from shared.events import (
    EdgeEvent,
    NodeFired,
    NodeReady,
    OutputTotals,
    StreamTotals,
    TensorsReleased,
    WalkCall,
    WalkResult,
)
from shared.telemetry.tracing import NOTHING, Span
from shared.tensors import Handle
from shared.walks import (
    EARLY,
    Chunk,
    Client,
    CompiledNode,
    CompiledWalk,
    Emission,
    Firing,
    InputPort,
    WalkRun,
)
from workers.data_plane.port import INLINE_BYTES
from workers.data_plane.step_tensors import StepTensors, Value, copied
from workers.execution.kv_steps import KvNodes
from workers.execution.node_executor import HostedModel, NodeExecutor
from workers.execution.node_result import NodeResult
from workers.execution.output_tracks import OutputTracks
from workers.execution.recovered_output import RecoveredTrack
from workers.execution.step_placement import PROMPT, StepPlacement
from workers.execution.step_streams import StepStreams
from workers.generation.output_chunks import PostChunk
from workers.generation.sequence_handle import SequenceHandle
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams

MAX_EARLY: Final = 4096
"""So many firings of other ranks may wait for what they follow on."""
_TRACED: Final = ("prompt_tokens", "completion_tokens", "finish_reason")
"""What of a walk's facts its span tells: nothing that a client wrote."""

T = TypeVar("T")
Tell = Callable[[int, EdgeEvent], Coroutine[Any, Any, None]]
"""Tell a rank something, as soon as the log takes it."""


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
    feeding: set[InputPort] = field(default_factory=set)
    chunks: dict[InputPort, Chunk] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


Work: TypeAlias = Callable[[_Walking, T], Coroutine[Any, Any, None]]
"""What is done beside the walk: for it, and of a firing, emissions or a stream."""


class WalkChain:
    """One order's walks, one after the other.

    Args:
        recalled: the output's tracks as the log has them.
        streams: the attempt's; None where the model has none.

    Attributes:
        tracks: what it puts out.
    """

    def __init__(
        self,
        hosted: HostedModel,
        key: StepKey,
        ready: NodeReady,
        placed: StepPlacement,
        *,
        recalled: Mapping[str, RecoveredTrack],
        post: PostChunk,
        tell: Tell,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        streams: AttemptStreams | None = None,
    ) -> None:
        self._hosted = hosted
        self._key = key
        self._ready = ready
        self._placed = placed
        self._tell = tell
        self._spawn = spawn
        self._streams = streams
        self._tensors = StepTensors(hosted.store, key, placed.rank)
        self._step_streams = StepStreams(streams, key, placed, self._tensors)
        self.tracks = OutputTracks(key, placed.tracks, recalled, post, choice=_choice_of(ready))
        self._sequences = KvNodes(
            key=key,
            ready=ready,
            placed=placed,
            processing=hosted.processing,
            engine_rows=hosted.rows,
            store=hosted.store,
            tensors=self._tensors,
            tracks=self.tracks,
            recalled=recalled,
            on_item=self._step_streams.on_item,
            read=self._have_read,
        )
        self._nodes = NodeExecutor(
            hosted,
            ready,
            placed,
            tensors=self._tensors,
            sequences=self._sequences,
            streams=self._step_streams,
        )
        self._values: dict[str, Any] = {}  # what walks put out, for those behind them
        self._walking: _Walking | None = None
        self._later: list[tuple[NodeFired, int]] = []  # of walks that have not begun here
        self._emitting: dict[int, Value] = {}
        self._in_turn = asyncio.Lock()

    @property
    def rows(self) -> Mapping[str, SequenceHandle]:
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
            self._step_streams.leave(place)
        self._step_streams.end(self._placed.ends)
        return results, durations_s

    async def stored(self) -> dict[str, OutputTotals]:
        """Wait until all that was put out and streamed on is stored; what each track then amounts to."""
        totals = await self.tracks.stored()
        await self._step_streams.stored()
        return totals

    def taken(self) -> dict[str, StreamTotals]:
        """What came in on the streams that this rank's nodes of the step take."""
        return self._step_streams.taken()

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
                self._start(walking, self._fire, firing)
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

    def _start(self, walking: _Walking, work: Work[T], of: T) -> None:
        walking.tasks.create_task(self._task(walking, work, of))

    async def _task(self, walking: _Walking, work: Work[T], of: T) -> None:
        await work(walking, of)  # called here: of a task that is dropped before it begins nothing is left
        self._advance(walking)

    # ---- firings here ------------------------------------------------------------------------------
    async def _fire(self, walking: _Walking, firing: Firing) -> None:
        node, key = walking.walk.nodes[firing.node], self._key_of(walking, firing)
        outcome = await self._nodes.fire(walking.place, firing, key, _chunk_taken(walking, node))
        walking.facts |= outcome.facts
        if outcome.streamed:
            await self._step_streams.send(node, outcome.streamed, key)
        emissions = walking.run.complete(firing, outcome.outputs, outcome.stops)
        assert emissions is not None, "a firing under way is completed once"
        self._tensors.on_edges([value for value in outcome.outputs.values() if isinstance(value, Handle)])
        if emissions:
            async with self._in_turn:  # at once: who completed first puts out first, in every attempt
                await self._tell_others(walking, firing, outcome, key)
                await self._leave(walking, emissions)
        else:
            await self._tell_others(walking, firing, outcome, key)
        self._let_go(walking)

    def _key_of(self, walking: _Walking, firing: Firing) -> str:
        """The prefix of the keys of what a firing puts out: request / attempt / step / walk / node.

        A walk that runs again in the same step has its place beside its name: no two tensors share a key.
        """
        request_id, attempt, step = self._key
        name, place = walking.walk.name, walking.place
        if any(walk.name == name for walk in self._placed.walks[:place]):
            name = f"{name}@{place}"
        return "/".join(map(str, (request_id, attempt, step, name, firing.node, *firing.path)))

    # ---- what leaves the walk ----------------------------------------------------------------------
    async def _leave_in_turn(self, walking: _Walking, emissions: Sequence[Emission]) -> None:
        async with self._in_turn:
            await self._leave(walking, emissions)

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
            array = await self._tensors.array(value)
            data = await copied(array.data)
            if isinstance(value, Handle):
                self._tensors.check([value])
        finally:
            self._emitting.pop(id(value), None)
        content: dict[str, Any]
        if modality == "text":
            content = {"text": data.decode()}
        else:
            media = self._hosted.graph.media.get(modality, {})
            metadata = {"dtype": array.dtype, "shape": list(array.shape), **media}
            content = {"modality": modality, "data": data, "metadata": metadata}
        self.tracks.release(node, content)
        await self.tracks.of(node).room()

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
    async def _tell_others(self, walking: _Walking, firing: Firing, outcome: NodeResult, key: str) -> None:
        if not self._placed.others:
            return
        node = walking.walk.nodes[firing.node]
        self._note_prompts(walking.place, outcome.outputs, node)
        outputs = {name: self._told(f"{key}/{name}", value) for name, value in outcome.outputs.items()}
        path = ".".join(map(str, (walking.place, firing.node, *firing.path)))
        for rank in self._placed.others:
            event = NodeFired(
                id=f"{self._key.request_id}.fired.{self._key.attempt}.{self._key.step}.{path}.{rank}",
                index=self._key.step,
                walk=walking.place,
                node=firing.node,
                path=firing.path,
                outputs=outputs,
                stops=[*outcome.stops, *firing.ends],
                row=outcome.row if rank == outcome.to else None,
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
            self._start(walking, self._leave_in_turn, own)
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
                self._start(walking, self._feed, stream)
            else:
                self._streams.watch(stream, partial(self._poke, walking))

    async def _feed(self, walking: _Walking, stream: InputPort) -> None:
        assert self._streams is not None
        chunk, array = await self._streams.chunk(stream)
        walking.feeding.discard(stream)
        walking.chunks[stream] = chunk
        fed = walking.run.feed(*stream, array, last=chunk.last)
        assert fed, "what was wanted is taken"


def _chunk_taken(walking: _Walking, node: CompiledNode) -> ChunkOf | None:
    """The chunk a firing takes: of its first streaming input, where it has several."""
    chunks = [walking.chunks.pop((stream, node.name)) for stream in node.streams]
    if not chunks:
        return None
    return ChunkOf(number=chunks[0].number, fresh=chunks[0].fresh, last=chunks[0].last)


def _choice_of(ready: NodeReady) -> int:
    """Which of several answers to one question the order is for."""
    return max((call.args.get("choice", 0) for call in ready.walks), default=0)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group: the others came of it, or beside it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
