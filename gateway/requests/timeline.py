"""The way of one request through the system, by its events on the log: what happened when, and where.

It has neither prompt nor answer, and no names of tensors: times, ranks, nodes, and codes of errors. So it may
be shown to whoever may see the status of the request.
"""

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.requests.relay import decode_or_none
from gateway.requests.service import Gateway
from gateway.requests.status import log_timeout
from shared.events import (
    AnyEvent,
    NodeReady,
    OutputChunk,
    RequestFailed,
    RequestRejected,
    WalkCompleted,
    WalkFailed,
    WalkStopped,
)
from shared.ids import RequestId
from shared.log.port import StoredRecord

MOST_EVENTS: Final = 1000
"""The most events of a timeline; the rest are left out, and counted."""
_NS: Final = 1_000_000_000
_KINDS: Final = ("request", "control", "walk", "ready", "done", "output")


@dataclass(slots=True)
class Timeline:
    """The events of a request so far. Chunks of its output are counted, with the first and last times."""

    events: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0
    chunks: int = 0
    first_chunk: float | None = None
    last_chunk: float | None = None

    def fold(self, kind: str, record: StoredRecord, event: AnyEvent | None) -> None:
        """Apply a record on a subject of the kind; None is no event."""
        if event is None or kind not in _KINDS:
            return
        time = record.time_ns / _NS
        if isinstance(event, OutputChunk):
            if not event.advisory:
                self.chunks += 1
                self.first_chunk = time if self.first_chunk is None else self.first_chunk
                self.last_chunk = time
        elif len(self.events) < MOST_EVENTS:
            self.events.append(_entry(time, record.seq, event))
        else:
            self.left_out += 1

    def document(self, request_id: str) -> dict[str, Any]:
        """The timeline for clients; times are in seconds since 1970, by the log's clock."""
        return {
            "object": "request.timeline",
            "id": request_id,
            "events": self.events,
            "left_out": self.left_out,
            "chunks": {"count": self.chunks, "first": self.first_chunk, "last": self.last_chunk},
        }


async def timeline_of(gateway: Gateway, request_id: RequestId) -> Timeline:
    """The timeline of a request, or of one part of it, as the log has it now.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    found, subjects = Timeline(), gateway.subjects
    async with log_timeout(), aclosing(gateway.log.history(subjects.all_of(request_id))) as records:
        async for record in records:
            address = subjects.parse(record.subject)
            if address is not None:
                found.fold(address.kind, record, decode_or_none(record, address))
    return found


def _entry(time: float, seq: int, event: AnyEvent) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": time,
        "seq": seq,
        "type": str(event.__struct_config__.tag).rsplit(".", 1)[0],
        "attempt": event.attempt,
    }
    rank = getattr(event, "rank", None)
    if rank is not None:
        entry |= {"rank": rank, "step": event.index}
    match event:
        case NodeReady():
            entry["nodes"] = sorted(node for node, place in event.placement.items() if place == event.rank)
            entry["walks"] = [call.name for call in event.walks]
        case WalkCompleted() | WalkFailed() | WalkStopped():
            entry["work"] = {
                node: {"took_s": work.took_s, "waited_s": work.waited_s} for node, work in event.work.items()
            }
        case _:
            pass
    if isinstance(event, RequestRejected | RequestFailed | WalkFailed):
        entry["code"] = event.failure.code
    return entry
