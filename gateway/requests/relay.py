"""The relay: the log's records become each request's answer, every chunk once, in log order.

One cursor serves the whole gateway; the `Hub` hands each record to the request it belongs to. What a
record means is decided by `OutputFold`, which is pure. Deposed conductors are fenced off, duplicate and
early chunks are sorted out, a rejection of somebody else's submission under the same id is not ours. An
output that does not add up to what `request.finished` says is an error and not an answer.

**A slow client** costs nobody else anything. Each request has a buffer of `BUFFER_BYTES`; the cursor
never waits for it. When it is full the hub lets go of the request, and the relay remembers the record it
stopped at: once the client has taken what is buffered, the rest is read from the log again by a cursor of
the request's own, at the client's speed. So memory is bounded, and the log is the buffer. A client that
attaches to an earlier request reads through such a cursor from the beginning.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from gateway.meters.hops import Hops, Journey
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import (
    AnyEvent,
    Failure,
    MalformedEventError,
    OutputChunk,
    OutputFence,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Usage,
    decode,
)
from shared.log.port import Log, StoredRecord
from shared.subject_rules import check_address
from shared.subjects import Address, Subjects
from shared.telemetry.log_fields import quoting
from shared.transcript import Transcript

_LOGGER: Final = logging.getLogger(__name__)
BUFFER_BYTES: Final = 256 * 1024
MISMATCH: Final = "output_mismatch"
_ITEM_BYTES: Final = 256  # what a chunk weighs beside its contents, roughly


class RequestExpiredError(ClientError):
    """The log has forgotten the request, or lost it."""

    code = "request_expired"
    status = 410

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the log holds request {request_id!r} no more: its answer cannot be had again; ask anew, under "
            "another id"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer is complete."""

    usage: Usage
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no (more of an) answer."""

    failure: Failure


Item: TypeAlias = OutputChunk | Answered | Failed


@dataclass(slots=True)
class OutputFold:
    """One request's answer as a fold over its records in log order; pure.

    Attributes:
        submission_seq: where our submission is stored; None until the log said so.
        ended: an end was given out; nothing follows it.
        told: how many chunks were given out. With several tracks that is a chunk's index for its client: each
            track counts its own, and the log's order, in which they are told, is one for all gateways.
    """

    submission_seq: int | None = None
    transcript: Transcript = field(default_factory=Transcript)
    ended: bool = False
    told: int = 0
    _rejections: list[RequestRejected] = field(default_factory=list)

    def fold(self, seq: int, event: AnyEvent) -> list[Item]:
        """Take one record; return what it adds to the answer."""
        if self.ended or (self.submission_seq is not None and seq <= self.submission_seq):
            return []
        items = self._items(event)
        self.ended = any(not isinstance(item, OutputChunk) for item in items)
        return items

    def submitted_at(self, seq: int) -> list[Item]:
        """Learn our submission's position; a rejection that was read before counts now."""
        self.submission_seq = seq
        ours = [rejected for rejected in self._rejections if rejected.submission_seq == seq]
        self._rejections.clear()
        if self.ended or not ours:
            return []
        self.ended = True
        return [Failed(ours[0].failure)]

    def _items(self, event: AnyEvent) -> list[Item]:
        match event:
            case OutputChunk() | OutputFence():
                return self._chunks(event)
            case RequestFinished():
                return [self._finish(event)]
            case RequestFailed():
                return [Failed(event.failure)]
            case RequestCancelled():
                message = f"the request was cancelled: {event.reason}"
                return [Failed(Failure(code="request_cancelled", message=message, status=410))]
            case RequestRejected() if self.submission_seq is None:
                self._rejections.append(event)
                return []
            case RequestRejected() if event.submission_seq == self.submission_seq:
                return [Failed(event.failure)]
            case _:
                return []

    def _chunks(self, event: OutputChunk | OutputFence) -> list[Item]:
        valid = self.transcript.fold(event)
        first, self.told = self.told, self.told + len(valid)
        if all(chunk.index == first + place for place, chunk in enumerate(valid)):
            return list(valid)
        return [msgspec.structs.replace(chunk, index=index) for index, chunk in enumerate(valid, start=first)]

    def _finish(self, event: RequestFinished) -> Item:
        found = self.transcript.totals
        if found == event.output:
            reason = event.finish_reasons[0] if event.finish_reasons else "stop"
            return Answered(usage=event.usage, finish_reason=reason)
        message = (
            f"the output does not add up: expected {event.output.chunks} chunks with digest "
            f"{event.output.digest}, the log gave {found.chunks} with {found.digest}"
        )
        return Failed(Failure(code=MISMATCH, message=message, status=500))


class Relay:
    """One client's answer: filled by the hub, or, when that is too fast, from a cursor of its own."""

    def __init__(self, log: Log, subjects: Subjects, request_id: str) -> None:
        self.request_id = request_id
        self.output = OutputFold()
        self.journey: Journey | None = None
        self.buffered_bytes = 0
        self._log = log
        self._subjects = subjects
        self._buffer: deque[tuple[Item, int]] = deque()
        self._wake = asyncio.Event()
        self._rest: tuple[int, EpochFence] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the rest of the answer is to be read from the log again."""
        return self._rest is not None

    # ---- the hub's side: nothing here waits ---------------------------------------------------------
    def take(self, seq: int, event: AnyEvent, epoch: int) -> None:
        """Take one record, or let go when the buffer is full."""
        if self.is_behind:
            return
        if self.buffered_bytes >= BUFFER_BYTES:
            self.reread(seq, epoch)
            return
        self._put(self.output.fold(seq, event))

    def submitted_at(self, seq: int) -> None:
        """Learn where our submission is stored."""
        self._put(self.output.submitted_at(seq))

    def reread(self, seq: int, epoch: int) -> None:
        """Have the records from `seq` on read by an own cursor; `epoch` is the one in force there."""
        self._rest = (seq, EpochFence(epoch))
        self._wake.set()

    def fail(self, failure: Failure) -> None:
        """End the answer for a reason that is not on the log."""
        if not self.output.ended and not self.is_behind:
            self.output.ended = True
            self._put([Failed(failure)])

    def _put(self, items: list[Item]) -> None:
        for item in items:
            size = _size_of(item)
            self._buffer.append((item, size))
            self.buffered_bytes += size
        if items:
            self._wake.set()

    # ---- the client's side --------------------------------------------------------------------------
    async def items(self) -> AsyncGenerator[Item, None]:
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

    async def _from_log(self, start_seq: int, fence: EpochFence) -> AsyncGenerator[Item, None]:
        watched = [
            self._subjects.epoch,
            self._subjects.walk(self.request_id),
            self._subjects.outputs_of(self.request_id),
        ]
        async with aclosing(self._log.read(watched, start_seq)) as records:
            async for record in records:
                address = self._subjects.parse(record.subject)
                event = decode_or_none(record, address) if address is not None else None
                if event is None or not fence.admits(event):
                    continue
                for item in self.output.fold(record.seq, event):
                    yield await self._explained(item)
                if self.output.ended:
                    return

    async def _explained(self, item: Item) -> Item:
        """What does not add up because the log has forgotten its beginning meanwhile is no error of ours."""
        if not isinstance(item, Failed) or item.failure.code != MISMATCH:
            return item
        submitted_seq = self.output.submission_seq or 0
        if (await self._log.state()).first_seq <= submitted_seq:
            return item
        expired = RequestExpiredError(self.request_id)
        return Failed(Failure(code=expired.code, message=expired.message, status=expired.status))


class Hub:
    """The gateway's one cursor, taken apart: each record goes to the request it belongs to."""

    def __init__(self, log: Log, subjects: Subjects, fence: EpochFence, hops: Hops | None = None) -> None:
        self._log = log
        self._subjects = subjects
        self._fence = fence
        self._hops = hops or Hops()
        self._relays: defaultdict[str, list[Relay]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._relays.values()))

    def open(self, request_id: str) -> Relay:
        """A relay for a request that is about to be submitted."""
        relay = Relay(self._log, self._subjects, request_id)
        relay.journey = self._hops.submit()
        self._relays[request_id].append(relay)
        return relay

    def close(self, relay: Relay) -> None:
        """Let go of a relay; letting go twice is nothing."""
        relays = self._relays.get(relay.request_id, [])
        if relay in relays:
            relays.remove(relay)
        if not relays:
            self._relays.pop(relay.request_id, None)

    def take(self, record: StoredRecord) -> Address | None:
        """Hand one record on, and say where it was addressed to. Never waits."""
        address = self._subjects.parse(record.subject)
        if address is not None:
            self._hand_on(address, record)
        return address

    def _hand_on(self, address: Address, record: StoredRecord) -> None:
        relays = self._relays.get(address.request_id, []) if address.request_id else []
        if not relays and address.kind != "conductor":
            return
        event = decode_or_none(record, address)
        if event is None or not self._fence.admits(event):
            return
        if relays:
            self._hops.delivered(record)
        for relay in list(relays):
            if relay.journey is not None:
                self._hops.take(relay.journey, event)
            relay.take(record.seq, event, self._fence.epoch)
            if relay.is_behind or relay.output.ended:
                self.close(relay)

    def fail_all(self, failure: Failure) -> None:
        """End every answer that still hangs on this cursor."""
        for relay in [relay for relays in self._relays.values() for relay in relays]:
            relay.fail(failure)
            self.close(relay)


def decode_or_none(record: StoredRecord, address: Address) -> AnyEvent | None:
    """The event in a record; what is none, or does not belong there, is said in our log and passed over."""
    try:
        event = decode(record.data)
        check_address(address, event)
        return event
    except MalformedEventError as error:
        _LOGGER.warning("record %d on %s is no event", record.seq, record.subject, extra=quoting(str(error)))
        return None


def _size_of(item: Item) -> int:
    if not isinstance(item, OutputChunk):
        return _ITEM_BYTES
    return _ITEM_BYTES + 4 * len(item.text) + 8 * len(item.token_ids) + len(item.data or b"")
