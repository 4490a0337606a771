"""One summary per request of a log, as `dalsegno log` lists them.

A submission that cannot be read is listed too, because its sender looks for it here. An id may be submitted
more than once; a later rejection of it is not the outcome of the request that owns the id.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dalsegno.terminal.tables import Cell, Column
from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    MalformedEventError,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    decode,
)
from shared.ids import is_addressable
from shared.log.port import Log, StoredRecord
from shared.subject_rules import check_event_subject
from shared.subjects import Address, Subjects

COLUMNS: Final = (
    Column("SUBMITTED", 24),
    Column("REQUEST", 36),
    Column("MODEL", 12),
    Column("OUTCOME", 27),
    Column("PROMPT+NEW", 10, is_right=True),
    Column("TOOK", 9, is_right=True),
    Column("EVENTS", 6, is_right=True),
)
_STYLES: Final = {"finished": "green", "failed": "red", "rejected": "red", "cancelled": "yellow"}


@dataclass(slots=True, kw_only=True)
class Summary:
    """One request.

    Attributes:
        model: None if the submission cannot be read.
        seq: the submission's position.
        end_ns: None while the request runs.
        outcome: `open`, `finished`, `failed`, `rejected` or `cancelled`.
        finish_reason: the reason of a finished request.
        code: the error of a failed or rejected one.
    """

    request_id: str
    model: str | None
    seq: int
    start_ns: int
    events: int = 0
    end_ns: int | None = None
    outcome: str = "open"
    finish_reason: str | None = None
    code: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def take(self, event: AnyEvent, time_ns: int) -> None:
        """Fold one event of the request."""
        match event:
            case RequestFinished():
                self.outcome, self.finish_reason = "finished", ", ".join(event.finish_reasons)
                self.prompt_tokens = event.usage.prompt_tokens
                self.completion_tokens = event.usage.completion_tokens
            case RequestFailed():
                self.outcome, self.code = "failed", event.failure.code
            case RequestRejected() if event.submission_seq == self.seq:
                self.outcome, self.code = "rejected", event.failure.code
            case RequestCancelled():
                self.outcome = "cancelled"
            case _:
                return
        self.end_ns = time_ns

    def row(self) -> Sequence[Cell]:
        """The cells of its row under `COLUMNS`."""
        why = self.finish_reason or self.code
        outcome = f"{self.outcome}: {why}" if why else self.outcome
        tokens = "" if self.prompt_tokens is None else f"{self.prompt_tokens}+{self.completion_tokens}"
        took = "" if self.end_ns is None else f"{(self.end_ns - self.start_ns) / 1e6:.0f} ms"
        styled = (outcome, _STYLES.get(self.outcome, ""))
        return iso(self.start_ns), self.request_id, self.model or "?", styled, tokens, took, str(self.events)

    def plain(self) -> dict[str, object]:
        """The summary as JSON values."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "submitted": iso(self.start_ns),
            "outcome": self.outcome,
            "finish_reason": self.finish_reason,
            "code": self.code,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": None if self.end_ns is None else (self.end_ns - self.start_ns) / 1e9,
            "events": self.events,
        }


async def summaries(log: Log, subjects: Subjects) -> list[Summary]:
    """Return a summary of every request in the log, in order of submission."""
    found: dict[str, Summary] = {}
    fence = EpochFence()
    async for record in log.history(subjects.logged()):
        address = subjects.parse(record.subject)
        if address is None:
            continue
        event = _event(record, address)
        if event is not None and not fence.admits(event):
            continue
        if address.kind == "request":
            _submit(found, record, str(address.request_id), event)
        summary = found.get(str(address.request_id))
        if summary is not None:
            summary.events += 1
            if event is not None:
                summary.take(event, record.time_ns)
    return list(found.values())


def _event(record: StoredRecord, address: Address) -> AnyEvent | None:
    """Decode a record; None if the conductor cannot read it either."""
    with contextlib.suppress(MalformedEventError):
        event = decode(record.data, address.kind)
        check_event_subject(address, event)
        return event
    return None


def _submit(found: dict[str, Summary], record: StoredRecord, request_id: str, event: AnyEvent | None) -> None:
    known = found.get(request_id)
    model = event.model if isinstance(event, RequestSubmitted) else None
    # The first readable submission owns the id; an unreadable one is rejected and owns none.
    is_new = known is None or (known.model is None and model is not None)
    if is_new and is_addressable(request_id):
        found.pop(request_id, None)
        found[request_id] = Summary(
            request_id=request_id, model=model, seq=record.seq, start_ns=record.time_ns
        )


def iso(time_ns: int) -> str:
    """A log time in UTC."""
    return (
        datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
