"""The conductor's event writer: subject, signature and publication of decisions.

The core makes the decisions. The writer adds its own name, a count, and the epoch by which readers
recognise the events of a deposed conductor.
"""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.react import Deadline
from conductor.core.request import Decision
from conductor.liveness import Loss
from shared import faults
from shared.errors import CapacityError
from shared.events import DeadlinePassed, Event, NodeReady, OutputFence, WalkStop, WorkerLost, encode
from shared.log.port import Log
from shared.subjects import CONDUCTOR_WRITER, Subjects
from shared.telemetry import tracing


class DecisionWriter:
    """Writes events as the conductor, in the epoch that `cluster` has read last.

    Attributes:
        count: events written so far.
    """

    def __init__(self, log: Log, subjects: Subjects, cluster: Cluster) -> None:
        self.count = 0
        self._log = log
        self._subjects = subjects
        self._cluster = cluster

    async def decide(self, decisions: Iterable[Decision], seq: int, read_ns: int) -> None:
        """Publish the decisions that follow from the record at `seq`, which was read at `read_ns`."""
        for decision in decisions:
            faults.reach("conductor.decision.made")
            span = _span(decision, seq, read_ns) if tracing.is_on() else tracing.INVALID_SPAN
            await self._post(self._subject(decision), decision, partial(_stored, span))
            faults.reach("conductor.decision.posted")

    async def record_loss(self, loss: Loss) -> None:
        """Publish the loss of an incarnation."""
        event = WorkerLost(
            id=f"worker.{loss.rank}.{loss.incarnation}.lost",
            rank=loss.rank,
            incarnation=loss.incarnation,
            reason=loss.reason,
            read_seq=loss.read_seq,
            silent_s=loss.silent_s,
        )
        await self._post(self._subjects.lost, event)
        faults.reach("conductor.lost.posted")

    async def record_deadline(self, deadline: Deadline, stored: Callable[[int], None]) -> None:
        """Publish that a time limit has passed; `stored(seq)` is called when the log has stored it."""
        request = self._cluster.request(deadline.request_id)
        subject = "request" if deadline.step is None else str(deadline.step)
        # An event that is stored too early is repeated as another event.
        unique = f"{self._cluster.fence.epoch}.{self.count + 1}"
        event = DeadlinePassed(
            id=f"{deadline.request_id}.deadline.{deadline.attempt}.{subject}.{unique}",
            request_id=deadline.request_id,
            attempt=deadline.attempt,
            deadline_ns=deadline.at_ns,
            step=deadline.step,
            trace=request.submission.trace if request is not None else None,
        )
        await self._post(self._subjects.walk(deadline.request_id), event, stored)

    async def _post(self, subject: str, event: Event, stored: Callable[[int], None] | None = None) -> None:
        self.count += 1
        data = encode(
            msgspec.structs.replace(
                event, writer=CONDUCTOR_WRITER, number=self.count, epoch=self._cluster.fence.epoch
            )
        )
        while True:
            try:
                return self._log.post(subject, data, stored)
            except CapacityError:
                await self._log.drain()

    def _subject(self, decision: Decision) -> str:
        return subject_of(decision, self._subjects, self._origin)

    def _origin(self, request_id: str) -> str:
        request = self._cluster.request(request_id)
        assert request is not None, "only known requests get a fence"
        return request.submission.origin


def subject_of(decision: Decision, subjects: Subjects, origin_of: Callable[[str], str]) -> str:
    """The subject of a decision; `origin_of` is the origin of a request, by id."""
    request_id = str(decision.request_id)
    match decision:
        case NodeReady() | WalkStop():
            return subjects.ready(decision.rank, request_id)
        case OutputFence():
            return subjects.output(origin_of(request_id), request_id, CONDUCTOR_WRITER)
        case _:
            return subjects.walk(request_id)


def _span(decision: Decision, seq: int, read_ns: int) -> tracing.Span:
    """The trace span of a decision, from the reading of its record to the acknowledgement."""
    tag = str(decision.__struct_config__.tag).removesuffix(".v1")
    return tracing.start_span(
        f"decide {tag}",
        decision.trace,
        {
            "dalsegno.request_id": str(decision.request_id),
            "dalsegno.attempt": decision.attempt,
            "dalsegno.step": decision.index,
            "dalsegno.read_seq": seq,
        },
        start_ns=read_ns,
    )


def _stored(span: tracing.Span, seq: int) -> None:
    faults.reach("conductor.decision.acked")
    span.set_attributes({"dalsegno.log_seq": seq})
    span.end()
