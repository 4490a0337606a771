"""Runs orders: each `node.ready` is one chain of walks, from its inputs to one `walk.completed`.

    StartOrder ──> what the log has of its output ──> WalkChain ──> every chunk acked ──> walk.completed
    ReceivedEdge ──> of a step: its chain; of a stream: its attempt's streams
    StopOrder  ──> the order dropped, its rows cancelled ──> walk.stopped; with the last one, its attempt's streams
    RequestEnded ──> all that was kept for the request, freed

How a chain of walks is run is `workers.execution.walk_chain`'s. What outlives a step belongs to its request,
until the log shows its end: streams to the attempt, tensors that were kept to the request.

What goes wrong inside an order ends in a `walk.failed`: typed errors with their own code, others as
`internal_error` (the trace stays in the process's log). It never ends another order.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from shared import faults
from shared.errors import BugError, CapacityError, DalSegnoError
from shared.events import (
    EdgeEvent,
    Event,
    Failure,
    NodeFired,
    NodeReady,
    OutputChunk,
    OutputTotals,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WalkStopped,
)
from shared.log.port import Log
from shared.subjects import Subjects
from shared.telemetry import tracing
from shared.telemetry.log_fields import MAY_QUOTE
from shared.telemetry.tracing import Span
from shared.tensors import Handle
from workers.data_plane.step_tensors import LostTensor
from workers.execution.node_executor import HostedModel
from workers.execution.quarantine import QuarantineProgress
from workers.execution.recovered_output import OutputRecovery, RecoveredTrack
from workers.execution.step_placement import StepPlacement
from workers.execution.walk_chain import WalkChain
from workers.generation.output_chunks import OutputState, PostChunk
from workers.membership.event_writer import EventWriter
from workers.orders.inbox import AttemptEnded, RequestEnded, StartOrder, StepKey, StopOrder
from workers.orders.out_of_order_buffer import ReceivedEdge
from workers.streams.attempt_streams import AttemptStreams, EdgeCounters

_LOGGER: Final = logging.getLogger(__name__)

MAX_ORDERS: Final = 4096
"""More at once are refused: far more than any conductor admits."""
KEPT_OUTPUTS: Final = 4096
"""Of so many requests it is known without reading the log where their output stands between two steps."""


@dataclass(slots=True)
class _Order:
    """One order under way."""

    key: StepKey
    ready: NodeReady
    seq: int = 0
    refused: str = ""
    chain: WalkChain | None = None
    task: asyncio.Task[None] | None = None
    heard: list[ReceivedEdge] = field(default_factory=list)  # before there is a chain


@dataclass(slots=True)
class _Request:
    """What outlives a request's steps.

    Attributes:
        attempt: the highest that was heard of; what is here is of it.
        touched: the store may have something of the request.
    """

    attempt: int
    streams: AttemptStreams | None = None
    touched: bool = False


class OrderExecutor:
    """Runs the orders of one life; its tasks are owned by `tasks`.

    `counts` says what it told other ranks, and heard from them.
    """

    def __init__(
        self,
        hosted: HostedModel,
        *,
        log: Log,
        subjects: Subjects,
        writer: EventWriter,
        tasks: asyncio.TaskGroup,
        counts: EdgeCounters | None = None,
    ) -> None:
        self.counts = counts if counts is not None else EdgeCounters()
        self._hosted = hosted
        self._log = log
        self._subjects = subjects
        self._writer = writer
        self._tasks = tasks
        self._orders: dict[StepKey, _Order] = {}
        self._requests: dict[str, _Request] = {}
        self._outputs: OrderedDict[str, dict[str, OutputState]] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._orders)

    # ---- orders in ---------------------------------------------------------------------------------
    def start(self, start: StartOrder, seq: int = 0) -> None:
        """Run an order, stored at `seq`; lower attempts of its request are dropped without a word."""
        key = start.key
        if key in self._orders:
            return
        for lower in self._orders_of(key.request_id, key.attempt - 1):
            self._drop_at_once(self._orders[lower])
        refused = start.refused
        if len(self._orders) >= MAX_ORDERS:
            refused = f"this worker runs {MAX_ORDERS} steps already; try again later"
        order = self._orders[key] = _Order(key, start.order, seq, refused=refused)
        self._idle.clear()
        self._begin_attempt(key)
        for heard in start.heard:
            self._hear(order, heard)
        order.task = self._tasks.create_task(self._run(order), name=f"run {key}")

    def stop(self, stop: StopOrder) -> None:
        """Drop an order and report it; one that has reported already is left as it is."""
        order = self._orders.get(stop.key)
        if order is not None or not stop.started:
            self._forget(stop.key)
            self._tasks.create_task(self._stopped(order, stop), name=f"stop {stop.key}")
        else:
            self._leave_attempt(stop.key.request_id, stop.key.attempt)

    def over(self, over: AttemptEnded) -> None:
        """Attempts of a request are over: drop what still runs of them, without a word."""
        for key in self._orders_of(over.request_id, over.attempt):
            self._drop_at_once(self._orders[key])
        self._leave_attempt(over.request_id, over.attempt)

    def hear(self, heard: ReceivedEdge) -> None:
        """Take what another rank told, for an order or an attempt that has begun here."""
        event = heard.event
        self.counts.heard += 1
        if isinstance(event, StreamSent | StreamTaken):
            request = self._requests.get(str(event.request_id))
            if request is not None and request.attempt == event.attempt and request.streams is not None:
                request.streams.hear(heard)
            return
        order = self._orders.get(StepKey(str(event.request_id), event.attempt, event.index))
        if order is not None:
            self._hear(order, heard)

    def end(self, ended: RequestEnded) -> None:
        """A request is over: drop what still runs of it, and free what was kept for it."""
        request = self._requests.pop(ended.request_id, None)
        if request is None:
            return  # another rank's
        for key in [key for key in self._orders if key.request_id == ended.request_id]:
            self._drop_at_once(self._orders[key])
        self._outputs.pop(ended.request_id, None)
        self._close(request)
        if request.touched:
            self._hosted.store.end(ended.request_id)

    async def finish(self, timeout_s: float) -> bool:
        """Wait until nothing runs; whether that came about in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def abandon(self) -> None:
        """Drop everything without a word: this life is over, or nearly."""
        for order in list(self._orders.values()):
            await self._drop(order)
        for request_id in list(self._requests):
            self.end(RequestEnded(request_id))

    # ---- requests ----------------------------------------------------------------------------------
    def _begin_attempt(self, key: StepKey) -> None:
        """An order of an attempt has come: what lower ones left is over."""
        request = self._requests.get(key.request_id)
        if request is None:
            request = self._requests[key.request_id] = _Request(key.attempt)
        elif key.attempt > request.attempt:
            self._free_attempt(key.request_id, request)
            request.attempt = key.attempt
        if request.streams is None and self._hosted.graph.streams:
            request.streams = self._open_streams(self._orders[key])

    def _open_streams(self, order: _Order) -> AttemptStreams:
        key, ready = order.key, order.ready

        def tell(rank: int, event: StreamSent | StreamTaken, stored: Callable[[int], None] | None) -> None:
            self._writer.post(self._edge_to(rank, ready), _told(event, ready, rank), stored)
            self.counts.told += 1

        async def tell_when_possible(rank: int, event: StreamTaken) -> None:
            await self._tell(ready, rank, event)

        return AttemptStreams(
            self._hosted.graph.streams,
            f"{key.request_id}/{key.attempt}",
            rank=ready.rank,
            store=self._hosted.store,
            rows=self._hosted.rows,
            tell=tell,
            tell_when_possible=tell_when_possible,
            spawn=self._spawn,
            counts=self.counts,
        )

    def _orders_of(self, request_id: str, attempt: int) -> list[StepKey]:
        """The orders of a request, up to an attempt."""
        return [key for key in self._orders if key.request_id == request_id and key.attempt <= attempt]

    def _leave_attempt(self, request_id: str, attempt: int) -> None:
        """An attempt is over: with its last order here goes what outlived those before."""
        request = self._requests.get(request_id)
        if request is None or request.attempt > attempt or self._orders_of(request_id, attempt):
            return
        self._free_attempt(request_id, request)

    def _free_attempt(self, request_id: str, request: _Request) -> None:
        self._close(request)
        if request.touched:
            self._hosted.store.end(f"{request_id}/{request.attempt}")

    @staticmethod
    def _close(request: _Request) -> None:
        if request.streams is not None:
            request.streams.close()
            request.streams = None

    # ---- other ranks -------------------------------------------------------------------------------
    def _hear(self, order: _Order, heard: ReceivedEdge) -> None:
        event = heard.event
        if isinstance(event, StreamSent | StreamTaken):
            self.hear(heard)
        elif order.chain is None:
            order.heard.append(heard)
        elif isinstance(event, NodeFired | TensorsReleased):
            order.chain.hear(event, heard.rank)

    async def _tell(self, ready: NodeReady, rank: int, event: EdgeEvent) -> None:
        """Tell another rank something, as soon as the log takes it."""
        self.counts.told += 1
        await self._writer.post_when_possible(self._edge_to(rank, ready), _told(event, ready, rank))

    def _edge_to(self, rank: int, ready: NodeReady) -> str:
        return self._subjects.edge(rank, ready.rank, str(ready.request_id))

    def _spawn(self, told: Coroutine[Any, Any, None]) -> None:
        """Tell something that nobody waits for; where the log is closed, nobody reads it either."""

        async def quietly() -> None:
            with suppress(DalSegnoError):
                await told

        # Of a task that is cancelled before it begins, the work would be left, never awaited.
        self._tasks.create_task(quietly()).add_done_callback(lambda _: told.close())

    # ---- one order ---------------------------------------------------------------------------------
    async def _run(self, order: _Order) -> None:
        with _span(order) as span:
            await self._carry_out(order, span)

    async def _carry_out(self, order: _Order, span: Span) -> None:
        try:
            completed = await self._answer(order, span)
            faults.reach("worker.completed.posting")
            await self._report(order.ready, completed, lambda _: faults.reach("worker.completed.acked"))
            faults.reach("worker.completed.posted")
        except DalSegnoError as error:
            span.fail(error.failure_code)
            failure = Failure(code=error.failure_code, message=error.message, status=error.failure_status)
            await self._fail(order, failure, error.handle if isinstance(error, LostTensor) else None)
        except Exception as error:  # an order's outermost loop: it fails, the worker goes on
            _LOGGER.exception("step %s failed", order.key, extra=MAY_QUOTE)
            span.fail(BugError.code)
            failure = Failure(code=BugError.code, message=f"{type(error).__name__}: {error}")
            await self._fail(order, failure)
        self._forget(order.key)

    async def _answer(self, order: _Order, span: Span) -> WalkCompleted:
        if order.refused:
            raise CapacityError(order.refused)
        key, ready = order.key, order.ready
        placed = StepPlacement(self._hosted.script, ready)
        recalled = await self._recall(key, placed, order.seq)

        post = self._output_of(ready)
        if ready.on_probation:
            await self._begun(order)
            probation = QuarantineProgress(placed.tracks, self._hosted.graph.nodes, recalled)
            post = self._watched(order, post, probation)
        request = self._requests[key.request_id]
        request.touched = request.touched or _touches(self._hosted, placed)
        order.chain = chain = WalkChain(
            self._hosted,
            key,
            ready,
            placed,
            recalled=recalled,
            post=post,
            tell=partial(self._tell, ready),
            spawn=self._spawn,
            streams=request.streams,
        )
        for heard in order.heard:
            self._hear(order, heard)
        faults.reach("worker.node.started")
        results, durations_s = await chain.run(span)
        totals = await chain.stored()
        span.set({"dalsegno.tokens": sum(row.answer.tokens for row in chain.rows.values())})
        self._keep(key.request_id, chain.tracks.states)
        chain.close()
        return WalkCompleted(
            id=f"{key.request_id}.done.{key.attempt}.{key.step}.{ready.rank}",
            rank=ready.rank,
            results=results,
            output=totals.pop("", OutputTotals()),
            tracks=totals,
            durations_s=durations_s,
            streams=chain.taken(),
        )

    def _output_of(self, ready: NodeReady) -> PostChunk:
        """Where the chunks of an order go."""
        subject = self._subjects.output(ready.origin, str(ready.request_id), self._writer.name)

        def post(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
            self._writer.post(subject, _answering(chunk, ready, chunk.index), stored)

        return post

    def _watched(self, order: _Order, post: PostChunk, probation: QuarantineProgress) -> PostChunk:
        """The same, and where what is stored is progress, it is said."""

        def watched(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
            def then(seq: int) -> None:
                stored(seq)
                if probation.stored(chunk) and order.key in self._orders:
                    self._spawn(self._progressed(order, probation.tokens))

            post(chunk, then)

        return watched

    async def _begun(self, order: _Order) -> None:
        """Say that it begins, and wait until that is stored: only then can it be what this worker dies of."""
        key, rank = order.key, order.ready.rank
        stored = asyncio.Event()
        event = WalkBegun(id=f"{key.request_id}.begun.{key.attempt}.{key.step}.{rank}", rank=rank)
        await self._report(order.ready, event, lambda _: stored.set())
        await stored.wait()

    async def _progressed(self, order: _Order, tokens: int) -> None:
        key, rank = order.key, order.ready.rank
        event = WalkProgressed(
            id=f"{key.request_id}.progressed.{key.attempt}.{key.step}.{rank}", rank=rank, tokens=tokens
        )
        await self._report(order.ready, event)

    async def _recall(self, key: StepKey, placed: StepPlacement, seq: int) -> Mapping[str, RecoveredTrack]:
        """Where the tracks of the request's output stand, as far as a step ordered at `seq` has to know."""
        names = {*placed.tracks.values()}
        if key.attempt <= 1:
            if key.step == 0 or not names:
                return {}
            kept = self._outputs.get(key.request_id)
            if kept is not None and all(map(placed.is_sole_speaker, placed.tracks)):
                return {name: RecoveredTrack(state=kept[name]) for name in names if name in kept}
        elif not names and not placed.has_rows:
            return {}
        recall = OutputRecovery(self._subjects, key, seq)
        # Earlier steps' chunks are in the log before this step is ordered; a fence may still be on its way.
        reads = self._log.history if key.attempt <= 1 else self._log.read
        async with aclosing(reads(recall.subjects(), 1)) as records:
            async for record in records:
                recall.fold(record)
                if recall.complete:
                    break
        return recall.result()

    def _keep(self, request_id: str, states: dict[str, OutputState]) -> None:
        self._outputs[request_id] = self._outputs.get(request_id, {}) | states
        self._outputs.move_to_end(request_id)
        while len(self._outputs) > KEPT_OUTPUTS:
            self._outputs.popitem(last=False)

    # ---- orders out --------------------------------------------------------------------------------
    async def _fail(self, order: _Order, failure: Failure, gone: Handle | None = None) -> None:
        await self._release(order)
        key, rank = order.key, order.ready.rank
        event = WalkFailed(
            id=f"{key.request_id}.failed.{key.attempt}.{key.step}.{rank}",
            rank=rank,
            failure=failure,
            gone=gone.key if gone is not None else None,
            gone_rank=gone.rank if gone is not None else None,
            gone_life=gone.incarnation if gone is not None else None,
        )
        await self._report(order.ready, event)

    async def _stopped(self, order: _Order | None, stop: StopOrder) -> None:
        steps_after = await self._drop(order) if order is not None else 0
        rows = order.chain.rows.values() if order is not None and order.chain is not None else ()
        key, rank = stop.key, stop.order.rank
        event = WalkStopped(
            id=f"{key.request_id}.stopped.{key.attempt}.{key.step}.{rank}",
            rank=rank,
            steps_after=steps_after,
            tokens=sum(row.answer.tokens for row in rows),
        )
        self._leave_attempt(key.request_id, key.attempt)
        await self._report(stop.order, event)

    async def _drop(self, order: _Order) -> int:
        """Take an order out of everything; how many more engine steps held a row of it."""
        self._cut_off(order)
        return await self._release(order)

    def _drop_at_once(self, order: _Order) -> None:
        """The same, while nobody waits: not a line of it runs any more, for what it needs is going."""
        self._cut_off(order)
        self._tasks.create_task(self._release(order), name=f"drop {order.key}")

    def _cut_off(self, order: _Order) -> None:
        self._forget(order.key)
        assert order.task is not None
        order.task.cancel()

    async def _release(self, order: _Order) -> int:
        """Give up what an order holds; how many more engine steps held a row of it."""
        if order.chain is None:
            return 0
        order.chain.tracks.close()
        steps = [await self._hosted.rows.drop(row.key) for row in order.chain.rows.values()]
        order.chain.close()  # now nobody computes into it any more
        return max(steps, default=0)

    def _forget(self, key: StepKey) -> None:
        self._orders.pop(key, None)
        if not self._orders:
            self._idle.set()

    async def _report(
        self,
        order: NodeReady | WalkStop,
        event: WalkBegun | WalkProgressed | WalkCompleted | WalkFailed | WalkStopped,
        stored: Callable[[int], None] | None = None,
    ) -> None:
        """GeneratedText an order."""
        subject = self._subjects.done(order.rank, str(order.request_id))
        await self._writer.post_when_possible(subject, _answering(event, order, order.index), stored)


def _span(order: _Order) -> Span:
    """An order, from its reading to its report."""
    key, ready = order.key, order.ready
    return tracing.start(
        "order",
        ready.trace,
        {
            "dalsegno.request_id": key.request_id,
            "dalsegno.attempt": key.attempt,
            "dalsegno.step": key.step,
            "dalsegno.rank": ready.rank,
            "dalsegno.epoch": ready.epoch or 0,
            "dalsegno.log_seq": order.seq,
        },
    )


def _answering(event: Event, order: NodeReady | WalkStop, index: int) -> Event:
    """The event with what it has of the order it answers."""
    return msgspec.structs.replace(
        event,
        request_id=order.request_id,
        epoch=order.epoch,
        attempt=order.attempt,
        index=index,
        trace=order.trace,
    )


def _told(event: EdgeEvent, order: NodeReady, rank: int) -> EdgeEvent:
    """The event with what it has of the order it comes of, for the life of the rank that the order names."""
    return msgspec.structs.replace(
        event,
        request_id=order.request_id,
        epoch=order.epoch,
        attempt=order.attempt,
        trace=order.trace,
        to_life=order.lives.get(rank),
    )


def _touches(hosted: HostedModel, placed: StepPlacement) -> bool:
    """Whether a step may put something into the store: not one of CPU nodes and rows on a single rank."""
    return bool(placed.others or hosted.stateless is not None or hosted.graph.streams)
