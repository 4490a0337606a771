"""Executor of one worker's orders: each `node.ready` becomes one chain of walks and one `walk.completed`.

    StartOrder   ──> earlier output of its tracks ──> WalkChain ──> every chunk acked ──> walk.completed
    ReceivedEdge ──> the chain of its step, or the streams of its attempt
    StopOrder    ──> order dropped, its sequences cancelled ──> walk.stopped
    AttemptEnded ──> the attempt's orders dropped, its streams closed
    RequestEnded ──> everything kept for the request released

`workers.execution.walk_chain` runs the walks. Some state outlives a step: streams belong to the attempt, kept
tensors belong to the request until the log shows its end.

An error inside an order ends in its `walk.failed` and never affects another order. Typed errors report their
own code; all others report `internal_error`, and their trace stays in the log of this process.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from shared import faults
from shared.errors import BugError, CapacityError, DalSegnoError
from shared.events import (
    Failure,
    NodeFired,
    NodeReady,
    NodeWork,
    OutputChunk,
    OutputTotals,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkCompleted,
)
from shared.log.port import Log
from shared.subjects import Subjects
from shared.telemetry import tracing
from shared.telemetry.log_fields import MAY_QUOTE
from shared.telemetry.tracing import Span
from workers.data_plane.step_tensors import LostTensor
from workers.execution.node_executor import HostedModel
from workers.execution.order_events import OrderEvents, report_id
from workers.execution.quarantine import QuarantineProgress
from workers.execution.step_placement import StepPlacement
from workers.execution.track_states import TrackStates
from workers.execution.walk_chain import WalkChain
from workers.generation.output_chunks import PostChunk
from workers.membership.event_writer import EventWriter
from workers.orders.inbox import AttemptEnded, RequestEnded, StartOrder, StepKey, StopOrder
from workers.orders.out_of_order_buffer import ReceivedEdge
from workers.streams.attempt_streams import AttemptStreams
from workers.streams.edge_counters import EdgeCounters

_LOGGER: Final = logging.getLogger(__name__)

MAX_ORDERS: Final = 4096
"""The most orders at a time; more are refused. No conductor admits nearly as many."""


@dataclass(slots=True)
class _RunningOrder:
    """One order from its start to its report.

    Attributes:
        refused: the reason why the order cannot run; empty if it can.
        edges: edges received before there is a chain.
    """

    key: StepKey
    ready: NodeReady
    seq: int = 0
    refused: str = ""
    chain: WalkChain | None = None
    task: asyncio.Task[None] | None = None
    edges: list[ReceivedEdge] = field(default_factory=list)


@dataclass(slots=True)
class _RequestState:
    """The state of a request that outlives its steps.

    Attributes:
        attempt: the highest attempt so far; `streams` belong to it.
        touched: the tensor store may hold tensors of the request.
    """

    attempt: int
    streams: AttemptStreams | None = None
    touched: bool = False


class OrderExecutor:
    """Runs the orders of one incarnation of a worker; `tasks` owns all its tasks."""

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
        self._tasks = tasks
        self._events = OrderEvents(subjects, writer, self.counts)
        self._track_states = TrackStates(log, subjects)
        self._orders: dict[StepKey, _RunningOrder] = {}
        self._requests: dict[str, _RequestState] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """The number of running orders."""
        return len(self._orders)

    # ---- actions of the inbox ----------------------------------------------------------------------
    def start(self, start: StartOrder, seq: int = 0) -> None:
        """Run an order stored at `seq`; drop the request's orders of lower attempts without a report."""
        key = start.key
        if key in self._orders:
            return
        for lower in self._orders_of(key.request_id, key.attempt - 1):
            self._drop_at_once(self._orders[lower])
        refused = start.refused
        if len(self._orders) >= MAX_ORDERS:
            refused = f"this worker runs {MAX_ORDERS} steps already; try again later"
        order = self._orders[key] = _RunningOrder(key, start.order, seq, refused=refused)
        self._idle.clear()
        self._begin_attempt(key)
        for edge in start.edges:
            self._receive(order, edge)
        order.task = self._tasks.create_task(self._run(order), name=f"run {key}")

    def stop(self, stop: StopOrder) -> None:
        """Drop an order and report it; an order that has already reported is left alone."""
        order = self._orders.get(stop.key)
        if order is not None:
            self._cancel(order)  # now: the request may end, and its state be released, before the task runs
        if order is not None or not stop.started:
            self._tasks.create_task(self._stop(order, stop), name=f"stop {stop.key}")
        else:
            self._leave_attempt(stop.key.request_id, stop.key.attempt)

    def end_attempt(self, ended: AttemptEnded) -> None:
        """Drop the orders of a request up to an attempt, without a report."""
        for key in self._orders_of(ended.request_id, ended.attempt):
            self._drop_at_once(self._orders[key])
        self._leave_attempt(ended.request_id, ended.attempt)

    def end_request(self, ended: RequestEnded) -> None:
        """Drop the orders of a request and release everything kept for it."""
        request = self._requests.pop(ended.request_id, None)
        if request is None:
            return  # not a request of this rank
        for key in [key for key in self._orders if key.request_id == ended.request_id]:
            self._drop_at_once(self._orders[key])
        self._track_states.forget(ended.request_id)
        self._close(request)
        if request.touched:
            self._hosted.store.end(ended.request_id)

    def receive(self, edge: ReceivedEdge) -> None:
        """Pass an event of another rank to the running order, or the current attempt, that it is for."""
        event = edge.event
        self.counts.received += 1
        if isinstance(event, StreamSent | StreamTaken):
            self._receive_for_stream(edge)
            return
        order = self._orders.get(StepKey(str(event.request_id), event.attempt, event.index))
        if order is not None:
            self._receive(order, edge)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no order runs; return False on a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def abandon(self) -> None:
        """Drop all orders and release all state, without reports, at the end of this incarnation."""
        for order in list(self._orders.values()):
            self._cancel(order)
            await self._release(order)
        for request_id in list(self._requests):
            self.end_request(RequestEnded(request_id))

    # ---- attempts ----------------------------------------------------------------------------------
    def _begin_attempt(self, key: StepKey) -> None:
        """Create the attempt's state for its first order; release the state of lower attempts."""
        request = self._requests.get(key.request_id)
        if request is None:
            request = self._requests[key.request_id] = _RequestState(key.attempt)
        elif key.attempt > request.attempt:
            self._release_attempt(key.request_id, request)
            request.attempt = key.attempt
        if request.streams is None and self._hosted.graph.streams:
            request.streams = self._open_streams(self._orders[key])

    def _open_streams(self, order: _RunningOrder) -> AttemptStreams:
        key, ready = order.key, order.ready
        return AttemptStreams(
            self._hosted.graph.streams,
            f"{key.request_id}/{key.attempt}",
            rank=ready.rank,
            store=self._hosted.store,
            engine=self._hosted.engine,
            send=partial(self._events.send_now, ready),
            send_when_possible=partial(self._events.send, ready),
            spawn=self._spawn,
            counts=self.counts,
        )

    def _orders_of(self, request_id: str, attempt: int) -> list[StepKey]:
        """The running orders of a request, up to an attempt."""
        return [key for key in self._orders if key.request_id == request_id and key.attempt <= attempt]

    def _leave_attempt(self, request_id: str, attempt: int) -> None:
        """Release the state of an ended attempt, once none of its orders runs."""
        request = self._requests.get(request_id)
        if request is None or request.attempt > attempt or self._orders_of(request_id, attempt):
            return
        self._release_attempt(request_id, request)

    def _release_attempt(self, request_id: str, request: _RequestState) -> None:
        self._close(request)
        if request.touched:
            self._hosted.store.end(f"{request_id}/{request.attempt}")

    @staticmethod
    def _close(request: _RequestState) -> None:
        if request.streams is not None:
            request.streams.close()
            request.streams = None

    # ---- other ranks -------------------------------------------------------------------------------
    def _receive(self, order: _RunningOrder, edge: ReceivedEdge) -> None:
        event = edge.event
        if isinstance(event, StreamSent | StreamTaken):
            self.counts.received += 1
            self._receive_for_stream(edge)
        elif order.chain is None:
            order.edges.append(edge)
        elif isinstance(event, NodeFired | TensorsReleased):
            order.chain.receive(event, edge.rank)

    def _receive_for_stream(self, edge: ReceivedEdge) -> None:
        request = self._requests.get(str(edge.event.request_id))
        if request is not None and request.attempt == edge.event.attempt and request.streams is not None:
            request.streams.receive(edge)

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send an event in the background; if the log is closed, the event has no reader either."""

        async def quietly() -> None:
            with suppress(DalSegnoError):
                await sending

        # A task that is cancelled before it starts would leave its coroutine unawaited: close it then.
        self._tasks.create_task(quietly()).add_done_callback(lambda _: sending.close())

    # ---- one order ---------------------------------------------------------------------------------
    async def _run(self, order: _RunningOrder) -> None:
        with tracing.ending(_span(order)) as span:
            try:
                completed = await self._complete(order, span)
                faults.reach("worker.completed.posting")
                await self._events.report(
                    order.ready, completed, lambda _: faults.reach("worker.completed.acked")
                )
                faults.reach("worker.completed.posted")
            except DalSegnoError as error:
                tracing.fail(span, error.failure_code)
                failure = _failure_of(error)
                await self._fail(order, failure, error)
            except Exception as error:  # the order fails; the worker continues
                _LOGGER.exception("step %s failed", order.key, extra=MAY_QUOTE)
                tracing.fail(span, BugError.code)
                failure = Failure(code=BugError.code, message=f"{type(error).__name__}: {error}")
                await self._fail(order, failure, error)
            self._forget(order.key)

    async def _complete(self, order: _RunningOrder, span: Span) -> WalkCompleted:
        """Run an order's walks; return its report once all output is stored."""
        if order.refused:
            raise CapacityError(order.refused)
        key, ready = order.key, order.ready
        placement = StepPlacement(self._hosted.outputs, ready)
        recovered = await self._track_states.before(key, placement, order.seq, ready.weights_since)

        post = self._events.chunk_poster(ready)
        if ready.on_probation:
            await self._events.begun(ready)
            progress = QuarantineProgress(placement.tracks, self._hosted.graph.nodes, recovered.tracks)
            post = self._watched(order, post, progress)
        request = self._requests[key.request_id]
        request.touched = request.touched or _touches(self._hosted, placement)
        order.chain = chain = WalkChain(
            self._hosted,
            key,
            ready,
            placement,
            recovered=recovered,
            post=post,
            send=partial(self._events.send, ready),
            spawn=self._spawn,
            streams=request.streams,
        )
        for edge in order.edges:
            self._receive(order, edge)
        faults.reach("worker.node.started")
        results, durations_s = await chain.run(span)
        totals = await chain.wait_stored()
        span.set_attributes({"dalsegno.tokens": _generated_tokens(chain)})
        work = chain.work()
        _note_preemptions(span, work)
        self._track_states.remember(key.request_id, chain.tracks.states)
        chain.close()
        return WalkCompleted(
            id=report_id(ready, "done"),
            rank=ready.rank,
            results=results,
            output=totals.pop("", OutputTotals()),
            tracks=totals,
            durations_s=durations_s,
            streams=chain.stream_totals(),
            work=work,
        )

    def _watched(self, order: _RunningOrder, post: PostChunk, progress: QuarantineProgress) -> PostChunk:
        """`post`, with a report to the conductor once the stored chunks are enough progress."""

        def watched(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
            def then(seq: int) -> None:
                stored(seq)
                if progress.stored(chunk) and order.key in self._orders:
                    self._spawn(self._events.progressed(order.ready, progress.tokens))

            post(chunk, then)

        return watched

    # ---- the end of an order -----------------------------------------------------------------------
    async def _fail(self, order: _RunningOrder, failure: Failure, error: Exception) -> None:
        await self._release(order)
        work = order.chain.work() if order.chain is not None else {}
        lost = error.handle if isinstance(error, LostTensor) else None
        await self._events.failed(order.ready, failure, lost, work)

    async def _stop(self, order: _RunningOrder | None, stop: StopOrder) -> None:
        steps_after = await self._release(order) if order is not None else 0
        chain = order.chain if order is not None else None
        work = chain.work() if chain is not None else {}
        tokens = _generated_tokens(chain) if chain is not None else 0
        self._leave_attempt(stop.key.request_id, stop.key.attempt)
        await self._events.stopped(stop.key, stop.order, steps_after, tokens, work)

    def _drop_at_once(self, order: _RunningOrder) -> None:
        """Cancel an order now and release it in a task; its state may be released right after the call."""
        self._cancel(order)
        self._tasks.create_task(self._release(order), name=f"drop {order.key}")

    def _cancel(self, order: _RunningOrder) -> None:
        self._forget(order.key)
        assert order.task is not None
        order.task.cancel()

    async def _release(self, order: _RunningOrder) -> int:
        """Release an order's resources; return the number of engine steps that still computed for it."""
        if order.chain is None:
            return 0
        order.chain.tracks.close()
        drop = self._hosted.engine.drop
        steps = [await drop(key) for key in order.chain.engine_keys]
        order.chain.close()  # only now: no engine step computes into its tensors any more
        return max(steps, default=0)

    def _forget(self, key: StepKey) -> None:
        self._orders.pop(key, None)
        if not self._orders:
            self._idle.set()


def _span(order: _RunningOrder) -> Span:
    """The trace span of an order, from its reading to its report."""
    key, ready = order.key, order.ready
    return tracing.start_span(
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


def _failure_of(error: DalSegnoError) -> Failure:
    retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else None
    return Failure(
        code=error.failure_code,
        message=error.message,
        status=error.failure_status,
        retry_after_s=math.ceil(retry_after_s or 0),
        param=error.param,
    )


def _note_preemptions(span: Span, work: Mapping[str, NodeWork]) -> None:
    """Add an event to an order's span for each node that was preempted; its time is that of the report."""
    for node, one in work.items():
        if one.preemption_count:
            span.add_event(
                "preempted",
                {
                    "dalsegno.node": node,
                    "dalsegno.preemptions": one.preemption_count,
                    "dalsegno.preempted_s": one.preempted_s,
                    "dalsegno.recomputed_tokens": sum(found.tokens for found in one.preemptions),
                },
            )


def _generated_tokens(chain: WalkChain) -> int:
    return sum(sequence.generated.tokens for sequence in chain.sequences.values())


def _touches(hosted: HostedModel, placement: StepPlacement) -> bool:
    """True if a step may put tensors into the store: not for CPU and KV nodes alone on a single rank."""
    return bool(placement.peer_ranks or hosted.stateless is not None or hosted.graph.streams)
