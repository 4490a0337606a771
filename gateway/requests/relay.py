"""The relay: turns the log's records into each request's answer, every chunk once, in log order.

One cursor serves the whole gateway; the `RecordRouter` hands each record to the request it belongs to. The
meaning of a record is decided by `OutputFold`, which is pure: it drops chunks that are void
(`shared.request_output`), and the rejection of another submission under the same id. An output whose
digest differs from that in `request.finished` is an error and not an answer.

**A slow client** does not affect others. Each request has a buffer of `BUFFER_BYTES`, and the cursor never
waits for it. When the buffer is full, the router drops the request, and the relay notes the record at which
it stopped. Once the client has read the buffer, the rest is read from the log by a cursor of this request
alone, at the client's speed. So memory is bounded, and the log is the buffer. A client that attaches to an
earlier request reads it by such a cursor from the beginning.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from gateway.meters.hops import HopMeters, RequestHops
from gateway.requests.milestones import Milestones
from shared.checkpoints import is_checkpoint
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import (
    AnyEvent,
    Failure,
    MalformedEventError,
    OutputChunk,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Usage,
    decode,
)
from shared.log.port import Log, StoredRecord
from shared.request_output import RequestOutput
from shared.subject_rules import check_event_subject
from shared.subjects import Address, Subjects
from shared.telemetry.log_fields import quoting

_LOGGER: Final = logging.getLogger(__name__)
BUFFER_BYTES: Final = 256 * 1024
MISMATCH: Final = "output_mismatch"
REQUEST_CANCELLED: Final = "request_cancelled"
_ITEM_BYTES: Final = 256  # the approximate size of a chunk without its contents


class RequestForgottenError(ClientError):
    """The log has forgotten or lost the request."""

    code = "request_expired"
    status = 410

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the log no longer holds request {request_id!r}, so its answer is gone; send the request again "
            "under another id"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The end of an answer that is complete; `stop` is the stop string, or the token, that ended it."""

    usage: Usage
    finish_reason: str
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of an answer that failed, perhaps after some chunks."""

    failure: Failure


AnswerItem: TypeAlias = OutputChunk | Answered | Failed


@dataclass(slots=True)
class OutputFold:
    """One request's answer as a fold over its records in log order; pure.

    Attributes:
        submission_seq: the position of our submission; None until its ack.
        ended: the end of the answer was emitted; nothing follows it.
        emitted: the number of emitted chunks. With several tracks, each counts its own chunks; their index
            for the client is then the log's order, which is the same at all gateways. An advisory chunk has
            the index of the chunk before it.
    """

    submission_seq: int | None = None
    output: RequestOutput = field(default_factory=RequestOutput)
    ended: bool = False
    emitted: int = 0
    _rejections: list[RequestRejected] = field(default_factory=list)

    def fold(self, seq: int, address: Address, event: AnyEvent) -> list[AnswerItem]:
        """Apply one record; return what it adds to the answer."""
        if self.ended or (self.submission_seq is not None and seq <= self.submission_seq):
            return []
        items = self._chunks(address, event) or self._end(event)
        self.ended = any(not isinstance(item, OutputChunk) for item in items)
        return items

    def submitted_at(self, seq: int) -> list[AnswerItem]:
        """Set our submission's position; apply a rejection of it that was read before."""
        self.submission_seq = seq
        ours = [rejected for rejected in self._rejections if rejected.submission_seq == seq]
        self._rejections.clear()
        if self.ended or not ours:
            return []
        self.ended = True
        return [Failed(ours[0].failure)]

    def _end(self, event: AnyEvent) -> list[AnswerItem]:
        match event:
            case RequestFinished():
                return [self._finish(event)]
            case RequestFailed():
                return [Failed(event.failure)]
            case RequestCancelled():
                message = f"the request was cancelled: {event.reason}"
                return [Failed(Failure(code=REQUEST_CANCELLED, message=message, status=410))]
            case RequestRejected() if self.submission_seq is None:
                self._rejections.append(event)
                return []
            case RequestRejected() if event.submission_seq == self.submission_seq:
                return [Failed(event.failure)]
            case _:
                return []

    def _chunks(self, address: Address, event: AnyEvent) -> list[AnswerItem]:
        if isinstance(event, OutputChunk) and self.output.advises(address, event):
            if is_checkpoint(event):
                return []
            return [msgspec.structs.replace(event, index=self.emitted - 1)]
        valid = self.output.fold(address, event)
        first, self.emitted = self.emitted, self.emitted + len(valid)
        if all(chunk.index == first + place for place, chunk in enumerate(valid)):
            return list(valid)
        return [msgspec.structs.replace(chunk, index=index) for index, chunk in enumerate(valid, start=first)]

    def _finish(self, event: RequestFinished) -> AnswerItem:
        transcript = self.output.transcript
        if transcript.matches(event.output):
            reason = event.finish_reasons[0] if event.finish_reasons else "stop"
            stop = event.stop_reasons[0] if event.stop_reasons else None
            return Answered(usage=event.usage, finish_reason=reason, stop=stop)
        found = transcript.totals_of(event.output.form)
        message = (
            f"the output does not match its end: expected {event.output.chunks} chunks with digest "
            f"{event.output.digest}, found {found.chunks} with {found.digest} in the log"
        )
        return Failed(Failure(code=MISMATCH, message=message, status=500))


class Relay:
    """One client's answer, filled by the router, or by a cursor of its own if the client is slower.

    Attributes:
        milestones: what the records say for the request's trace; None if it is not traced.
    """

    def __init__(self, log: Log, subjects: Subjects, request_id: str) -> None:
        self.request_id = request_id
        self.output = OutputFold()
        self.hops: RequestHops | None = None
        self.milestones: Milestones | None = None
        self.buffered_bytes = 0
        self._log = log
        self._subjects = subjects
        self._buffer: deque[tuple[AnswerItem, int]] = deque()
        self._wake = asyncio.Event()
        self._rest: tuple[int, EpochFence] | None = None

    @property
    def is_behind(self) -> bool:
        """True if the rest of the answer is to be read from the log again."""
        return self._rest is not None

    # ---- called by the router: nothing here waits ---------------------------------------------------
    def add(self, record: StoredRecord, address: Address, event: AnyEvent, epoch: int) -> None:
        """Apply one record, or note its position if the buffer is full."""
        if self.is_behind:
            return
        if self.buffered_bytes >= BUFFER_BYTES:
            self.reread(record.seq, epoch)
            return
        self._put(self._fold(record, address, event))

    def submitted_at(self, seq: int) -> None:
        """Set our submission's position, when its ack arrives."""
        if self.milestones is not None:
            self.milestones.submitted(time.time_ns())
        self._put(self.output.submitted_at(seq))

    def reread(self, seq: int, epoch: int) -> None:
        """Read the records from `seq` on by an own cursor; `epoch` is the one in force there."""
        self._rest = (seq, EpochFence(epoch))
        self._wake.set()

    def fail(self, failure: Failure) -> None:
        """End the answer for a reason that is not on the log."""
        if not self.output.ended and not self.is_behind:
            self.output.ended = True
            self._put([Failed(failure)])

    def _fold(self, record: StoredRecord, address: Address, event: AnyEvent) -> list[AnswerItem]:
        """Fold one record; warn of a chunk whose writer may not write this output, once for each reason."""
        seq = record.seq
        if self.milestones is not None and not isinstance(event, OutputChunk):
            self.milestones.observe(event, record.time_ns)
        objections = self.output.output.objections
        known = len(objections)
        items = self.output.fold(seq, address, event)
        for objection in list(objections)[known:]:
            _LOGGER.warning(
                "request %s: a chunk at record %d is void and was not delivered: %s; see docs/security.md",
                self.request_id, seq, objection,
            )  # fmt: skip
        return items

    def _put(self, items: list[AnswerItem]) -> None:
        for item in items:
            size = _size_of(item)
            self._buffer.append((item, size))
            self.buffered_bytes += size
        if items:
            self._wake.set()

    # ---- called by the client's task ----------------------------------------------------------------
    async def items(self) -> AsyncGenerator[AnswerItem, None]:
        """The answer's chunks, each once, and its end."""
        while True:
            while self._buffer:
                item, size = self._buffer.popleft()
                self.buffered_bytes -= size
                yield item
                if not isinstance(item, OutputChunk):
                    return
            if self._rest is not None:
                break
            self._wake.clear()
            await self._wake.wait()
        async with aclosing(self._from_log(*self._rest)) as rest:
            async for item in rest:
                yield item

    async def _from_log(self, start_seq: int, fence: EpochFence) -> AsyncGenerator[AnswerItem, None]:
        watched = [
            self._subjects.epoch,
            self._subjects.walk(self.request_id),
            self._subjects.outputs_of(self.request_id),
        ]
        async with aclosing(self._log.read(watched, start_seq)) as records:
            async for record in records:
                address = self._subjects.parse(record.subject)
                event = decode_or_none(record, address) if address is not None else None
                if address is None or event is None or not fence.admits(event):
                    continue
                for item in self._fold(record, address, event):
                    yield await self._explained(item)
                if self.output.ended:
                    return

    async def _explained(self, item: AnswerItem) -> AnswerItem:
        """A mismatch becomes "expired" if the log has meanwhile forgotten the answer's beginning."""
        if not isinstance(item, Failed) or item.failure.code != MISMATCH:
            return item
        submitted_seq = self.output.submission_seq or 0
        if (await self._log.state()).first_seq <= submitted_seq:
            return item
        expired = RequestForgottenError(self.request_id)
        return Failed(Failure(code=expired.code, message=expired.message, status=expired.status))


class RecordRouter:
    """Hands each record of the gateway's one cursor to the relays of its request."""

    def __init__(
        self, log: Log, subjects: Subjects, fence: EpochFence, hops: HopMeters | None = None
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._fence = fence
        self._hops = hops or HopMeters()
        self._relays: defaultdict[str, list[Relay]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._relays.values()))

    def open(self, request_id: str) -> Relay:
        """A new relay for a request that is about to be submitted."""
        relay = Relay(self._log, self._subjects, request_id)
        relay.hops = self._hops.submit()
        self._relays[request_id].append(relay)
        return relay

    def close(self, relay: Relay) -> None:
        """Remove a relay; removing it again does nothing."""
        relays = self._relays.get(relay.request_id, [])
        if relay in relays:
            relays.remove(relay)
        if not relays:
            self._relays.pop(relay.request_id, None)

    def route(self, record: StoredRecord) -> Address | None:
        """Hand one record to its relays, and return its address. Never waits."""
        address = self._subjects.parse(record.subject)
        if address is not None:
            self._deliver(address, record)
        return address

    def _deliver(self, address: Address, record: StoredRecord) -> None:
        relays = self._relays.get(address.request_id, []) if address.request_id else []
        if not relays and address.kind != "conductor":
            return
        event = decode_or_none(record, address)
        if event is None or not self._fence.admits(event):
            return
        if relays:
            self._hops.delivered(record)
        for relay in list(relays):
            if relay.hops is not None:
                self._hops.observe(relay.hops, event)
            relay.add(record, address, event, self._fence.epoch)
            if relay.is_behind or relay.output.ended:
                self.close(relay)

    def fail_all(self, failure: Failure) -> None:
        """End every answer that still reads from this cursor."""
        for relay in [relay for relays in self._relays.values() for relay in relays]:
            relay.fail(failure)
            self.close(relay)


def decode_or_none(record: StoredRecord, address: Address) -> AnyEvent | None:
    """The event in a record; None, and a warning, for one that is malformed or on a wrong subject."""
    try:
        event = decode(record.data)
        check_event_subject(address, event)
        return event
    except MalformedEventError as error:
        _LOGGER.warning("record %d on %s is no event", record.seq, record.subject, extra=quoting(str(error)))
        return None


def _size_of(item: AnswerItem) -> int:
    if not isinstance(item, OutputChunk):
        return _ITEM_BYTES
    return _ITEM_BYTES + 4 * len(item.text) + 8 * len(item.token_ids) + len(item.data or b"")
