"""Runs orders: each `node.ready` is one chain of walks, from its inputs to one `walk.completed`.

    node.ready ──> per walk a WalkRun ──firing──> CPU node: a thread of the pool
                          ▲                  └──> KV node:  a row of the engine
                          └──────complete───────────┘
    all walks done ──> every chunk acked ──> walk.completed

Walks of a chain share one row per KV node: `prefill` begins it, a resident loop such as `decode` lets it
go on to its end. The engine runs through meanwhile; the walk is told when the row has begun and when it
has ended, not of every token. An input a walk of a chain is not given is what a walk before it put out
under that name.

What goes wrong inside an order ends in a `walk.failed`: typed errors with their own code, others as
`internal_error` (the trace stays in the process's log). It never ends another order.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec

from shared import tracing
from shared.errors import BugError, CapacityError, DalSegnoError
from shared.events import (
    Event,
    Failure,
    NodeReady,
    OutputChunk,
    WalkCompleted,
    WalkFailed,
    WalkStop,
    WalkStopped,
)
from shared.log.port import Log
from shared.said import MAY_QUOTE
from shared.subjects import Subjects
from shared.tracing import Span
from workers.chain import Chain, Hosted
from workers.inbox import Start, StepKey, Stop
from workers.output import OutputState
from workers.recall import Recall, Recalled
from workers.writer import EventWriter

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
    is_too_many: bool = False
    chain: Chain | None = None
    task: asyncio.Task[None] | None = None


class Executor:
    """Runs the orders of one life; its tasks are owned by `tasks`."""

    def __init__(
        self,
        hosted: Hosted,
        *,
        log: Log,
        subjects: Subjects,
        writer: EventWriter,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._hosted = hosted
        self._log = log
        self._subjects = subjects
        self._writer = writer
        self._tasks = tasks
        self._orders: dict[StepKey, _Order] = {}
        self._outputs: OrderedDict[str, OutputState] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._orders)

    # ---- orders in ---------------------------------------------------------------------------------
    def start(self, start: Start, seq: int = 0) -> None:
        """Run an order, stored at `seq`; lower attempts of its request are dropped without a word."""
        key = start.key
        if key in self._orders:
            return
        for other in [k for k in self._orders if k.request_id == key.request_id and k.attempt < key.attempt]:
            self._tasks.create_task(self._drop(self._orders[other]), name=f"drop {other}")
        order = self._orders[key] = _Order(key, start.order, seq, is_too_many=len(self._orders) >= MAX_ORDERS)
        self._idle.clear()
        order.task = self._tasks.create_task(self._run(order), name=f"run {key}")

    def stop(self, stop: Stop) -> None:
        """Drop an order and report it; one that has reported already is left as it is."""
        order = self._orders.get(stop.key)
        if order is not None or not stop.started:
            self._tasks.create_task(self._stopped(order, stop), name=f"stop {stop.key}")

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

    # ---- one order ---------------------------------------------------------------------------------
    async def _run(self, order: _Order) -> None:
        with _span(order) as span:
            await self._carry_out(order, span)

    async def _carry_out(self, order: _Order, span: Span) -> None:
        try:
            await self._report(order.ready, await self._answer(order, span))
        except DalSegnoError as error:
            span.fail(error.failure_code)
            failure = Failure(code=error.failure_code, message=error.message, status=error.failure_status)
            await self._fail(order, failure)
        except Exception as error:  # an order's outermost loop: it fails, the worker goes on
            _LOGGER.exception("step %s failed", order.key, extra=MAY_QUOTE)
            span.fail(BugError.code)
            failure = Failure(code=BugError.code, message=f"{type(error).__name__}: {error}")
            await self._fail(order, failure)
        self._forget(order.key)

    async def _answer(self, order: _Order, span: Span) -> WalkCompleted:
        if order.is_too_many:
            raise CapacityError(f"this worker runs {MAX_ORDERS} steps already; try again later")
        key, ready = order.key, order.ready
        recalled = await self._recall(key)

        def post(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
            subject = self._subjects.output(ready.origin, key.request_id, self._writer.name)
            self._writer.post(subject, _answering(chunk, ready, chunk.index), stored)

        order.chain = chain = Chain(self._hosted, key, ready, recalled, post)
        results, durations_s = await chain.run(span)
        totals = await chain.stored()
        span.set({"dalsegno.tokens": sum(row.answer.tokens for row in chain.rows.values())})
        self._keep(key.request_id, chain.state)
        return WalkCompleted(
            id=f"{key.request_id}.done.{key.attempt}.{key.step}.{ready.rank}",
            rank=ready.rank,
            results=results,
            output=totals,
            durations_s=durations_s,
        )

    async def _recall(self, key: StepKey) -> Recalled:
        """Where the request's output stands."""
        if key.attempt <= 1 and key.step == 0:
            return Recalled()
        if key.attempt <= 1 and (kept := self._outputs.get(key.request_id)) is not None:
            return Recalled(state=kept)
        recall = Recall(self._subjects, key)
        # Earlier steps' chunks are in the log before this step is ordered; a fence may still be on its way.
        reads = self._log.history if key.attempt <= 1 else self._log.read
        async with aclosing(reads(recall.subjects(), 1)) as records:
            async for record in records:
                recall.fold(record)
                if recall.complete:
                    break
        return recall.result()

    def _keep(self, request_id: str, state: OutputState) -> None:
        self._outputs[request_id] = state
        self._outputs.move_to_end(request_id)
        while len(self._outputs) > KEPT_OUTPUTS:
            self._outputs.popitem(last=False)

    # ---- orders out --------------------------------------------------------------------------------
    async def _fail(self, order: _Order, failure: Failure) -> None:
        await self._release(order)
        key, rank = order.key, order.ready.rank
        event = WalkFailed(
            id=f"{key.request_id}.failed.{key.attempt}.{key.step}.{rank}", rank=rank, failure=failure
        )
        await self._report(order.ready, event)

    async def _stopped(self, order: _Order | None, stop: Stop) -> None:
        steps_after = await self._drop(order) if order is not None else 0
        rows = order.chain.rows.values() if order is not None and order.chain is not None else ()
        key, rank = stop.key, stop.order.rank
        event = WalkStopped(
            id=f"{key.request_id}.stopped.{key.attempt}.{key.step}.{rank}",
            rank=rank,
            steps_after=steps_after,
            tokens=sum(row.answer.tokens for row in rows),
        )
        await self._report(stop.order, event)

    async def _drop(self, order: _Order) -> int:
        """Take an order out of everything; how many more engine steps held a row of it."""
        self._forget(order.key)
        assert order.task is not None
        order.task.cancel()
        return await self._release(order)

    async def _release(self, order: _Order) -> int:
        """Give up what an order holds; how many more engine steps held a row of it."""
        if order.chain is None:
            return 0
        order.chain.close()
        steps = [await self._hosted.rows.drop(row.key) for row in order.chain.rows.values()]
        return max(steps, default=0)

    def _forget(self, key: StepKey) -> None:
        self._orders.pop(key, None)
        if not self._orders:
            self._idle.set()

    async def _report(
        self, order: NodeReady | WalkStop, event: WalkCompleted | WalkFailed | WalkStopped
    ) -> None:
        """Answer an order."""
        subject = self._subjects.done(order.rank, str(order.request_id))
        await self._writer.post_when_possible(subject, _answering(event, order, order.index))


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
