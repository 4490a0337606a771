"""One summary per request of a log, as `dalsegno log` lists them.

A submission that cannot be read is listed too, because its sender looks for it here. An id may be submitted
more than once; a later rejection of it is not the outcome of the request that owns the id.
`dalsegno.history.summary_fold` makes summaries of a log's records.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from dalsegno.terminal.tables import Cell, Column
from shared.events import (
    AnyEvent,
    NodeReady,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
)

EVER_NS: Final = (1 << 63) - 1
"""Later than any time of a log."""
OUTCOMES: Final = ("finished", "failed", "rejected", "cancelled", "open")
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


class Summary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Its values change while its events are folded.

    Attributes:
        model: None if the submission cannot be read.
        tenant: the name of the API key that it came with; None without one.
        seq: the submission's position.
        last_seq: the position of its last event so far.
        admitted_ns: the time of its first admission; None before.
        first_ns: the time of the first piece of its answer; None before.
        end_ns: None while the request runs.
        outcome: one of `OUTCOMES`.
        finish_reason: the reason of a finished request.
        code: the error of a failed or rejected one.
        ranks: the ranks that got an order of it, ascending.
        attempts: the highest attempt that a rank got an order of; 0 before.
    """

    request_id: str
    model: str | None
    tenant: str | None = None
    seq: int
    start_ns: int
    last_seq: int = 0
    admitted_ns: int | None = None
    first_ns: int | None = None
    end_ns: int | None = None
    events: int = 0
    outcome: str = "open"
    finish_reason: str | None = None
    code: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ranks: list[int] = []
    attempts: int = 0

    def take(self, event: AnyEvent, time_ns: int) -> None:
        """Fold one event of the request."""
        match event:
            case NodeReady():
                self.ranks = sorted({*self.ranks, event.rank})
                self.attempts = max(self.attempts, event.attempt)
                return
            case RequestAdmitted():
                self.admitted_ns = self.admitted_ns or time_ns
                return
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

    # ---- times ---------------------------------------------------------------------------------------
    @property
    def queue_s(self) -> float | None:
        """The time from the submission to the admission, in seconds; None before."""
        return self._since_start(self.admitted_ns)

    @property
    def first_chunk_s(self) -> float | None:
        """The time from the submission to the first piece of the answer, in seconds; None before."""
        return self._since_start(self.first_ns)

    @property
    def duration_s(self) -> float | None:
        """The time from the submission to the end, in seconds; None while the request runs."""
        return self._since_start(self.end_ns)

    def _since_start(self, time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns - self.start_ns) / 1e9

    # ---- forms ---------------------------------------------------------------------------------------
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
            "tenant": self.tenant,
            "submitted": iso(self.start_ns),
            "outcome": self.outcome,
            "finish_reason": self.finish_reason,
            "code": self.code,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": self.duration_s,
            "queue_seconds": self.queue_s,
            "first_chunk_seconds": self.first_chunk_s,
            "ranks": self.ranks,
            "attempts": self.attempts,
            "events": self.events,
        }


def iso(time_ns: int) -> str:
    """A log time in UTC."""
    return (
        datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
