"""Events that a worker posts while it runs an order: output chunks, reports to the conductor, edges to peers.

Every event copies request, attempt, epoch and trace context of the order that it belongs to.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from shared.events import (
    EdgeEvent,
    Event,
    Failure,
    NodeReady,
    NodeWork,
    OutputChunk,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WalkStopped,
)
from shared.subjects import Subjects
from shared.tensors import Handle
from workers.generation.output_chunks import PostChunk
from workers.membership.event_writer import EventWriter
from workers.orders.inbox import StepKey
from workers.streams.edge_counters import EdgeCounters

Report: TypeAlias = WalkBegun | WalkProgressed | WalkCompleted | WalkFailed | WalkStopped


class OrderEvents:
    """The events of all orders of one worker; `counts` counts the events to other ranks."""

    def __init__(self, subjects: Subjects, writer: EventWriter, counts: EdgeCounters) -> None:
        self._subjects = subjects
        self._writer = writer
        self._counts = counts

    # ---- output ------------------------------------------------------------------------------------
    def chunk_poster(self, ready: NodeReady) -> PostChunk:
        """A function that posts the output chunks of an order."""
        subject = self._subjects.output(ready.origin, str(ready.request_id), self._writer.name)

        def post(chunk: OutputChunk, stored: Callable[[int], None]) -> None:
            self._writer.post(subject, _of_order(chunk, ready, chunk.index), stored)

        return post

    # ---- to the conductor --------------------------------------------------------------------------
    async def begun(self, ready: NodeReady) -> None:
        """Report that an order in quarantine begins, and wait until the report is stored.

        Only a stored report lets the conductor attribute a following death of this worker to the order.
        """
        stored = asyncio.Event()
        event = WalkBegun(id=report_id(ready, "begun"), rank=ready.rank)
        await self.report(ready, event, lambda _: stored.set())
        await stored.wait()

    async def progressed(self, ready: NodeReady, tokens: int) -> None:
        """Report the progress of an order in quarantine."""
        event = WalkProgressed(id=report_id(ready, "progressed"), rank=ready.rank, tokens=tokens)
        await self.report(ready, event)

    async def failed(
        self, ready: NodeReady, failure: Failure, lost: Handle | None, work: dict[str, NodeWork]
    ) -> None:
        """Report that an order failed; `lost` is the tensor that could not be read, if that is the cause."""
        event = WalkFailed(
            id=report_id(ready, "failed"),
            rank=ready.rank,
            failure=failure,
            gone=lost.key if lost is not None else None,
            gone_rank=lost.rank if lost is not None else None,
            gone_life=lost.incarnation if lost is not None else None,
            work=work,
        )
        await self.report(ready, event)

    async def stopped(
        self, key: StepKey, stop: WalkStop, steps_after: int, tokens: int, work: dict[str, NodeWork]
    ) -> None:
        """Report that an order was stopped, with the engine steps and tokens that it took."""
        event = WalkStopped(
            id=f"{key.request_id}.stopped.{key.attempt}.{key.step}.{stop.rank}",
            rank=stop.rank,
            steps_after=steps_after,
            tokens=tokens,
            work=work,
        )
        await self.report(stop, event)

    async def report(
        self, order: NodeReady | WalkStop, event: Report, stored: Callable[[int], None] | None = None
    ) -> None:
        """Post a report; `stored` is called with its position in the log."""
        subject = self._subjects.done(order.rank, str(order.request_id))
        await self._writer.post_when_possible(subject, _of_order(event, order, order.index), stored)

    # ---- to other ranks ----------------------------------------------------------------------------
    def send_now(
        self, ready: NodeReady, rank: int, event: EdgeEvent, stored: Callable[[int], None] | None
    ) -> None:
        """Post an event for another rank.

        Raises:
            CapacityError: the log's outbox is full; try later.
        """
        self._writer.post(self._edge_subject(rank, ready), _to_rank(event, ready, rank), stored)
        self._counts.sent += 1

    async def send(self, ready: NodeReady, rank: int, event: EdgeEvent) -> None:
        """Post an event for another rank as soon as the log accepts it."""
        self._counts.sent += 1
        await self._writer.post_when_possible(self._edge_subject(rank, ready), _to_rank(event, ready, rank))

    def _edge_subject(self, rank: int, ready: NodeReady) -> str:
        return self._subjects.edge(rank, ready.rank, str(ready.request_id))


def report_id(ready: NodeReady, what: str) -> str:
    """The event id of a report: the same for every copy of it."""
    return f"{ready.request_id}.{what}.{ready.attempt}.{ready.index}.{ready.rank}"


def _of_order(event: Event, order: NodeReady | WalkStop, index: int) -> Event:
    """The event with the fields that it copies from its order."""
    return msgspec.structs.replace(
        event,
        request_id=order.request_id,
        epoch=order.epoch,
        attempt=order.attempt,
        index=index,
        trace=order.trace,
    )


def _to_rank(event: EdgeEvent, order: NodeReady, rank: int) -> EdgeEvent:
    """The event with the fields of its order, addressed to the incarnation of `rank` that the order names."""
    return msgspec.structs.replace(
        event,
        request_id=order.request_id,
        epoch=order.epoch,
        attempt=order.attempt,
        trace=order.trace,
        to_life=order.lives.get(rank),
    )
