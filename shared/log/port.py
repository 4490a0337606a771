"""The log's port: what the planes ask of it, and no more.

Readers are ordered, ack-less cursors; publishers are tracked to their acks. Two adapters satisfy it,
`shared.log.nats.jetstream.JetStreamLog` and `shared.log.memory.MemoryLog`, under one contract suite
(`tests/shared/log/contract.py`).
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec

from shared.errors import CapacityError, ClientError, DalSegnoError
from shared.telemetry.histogram import SECONDS, Histogram

Durability: TypeAlias = Literal["process", "host", "cluster"]
"""What an acked event survives: the end of any process, of the machine under the server, of one of three
servers."""


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """One event as the log holds it: its position, its subject, its bytes, and when it was stored.

    A Struct, for a replay makes 100,000 of them a second: 0.1 us each, a frozen dataclass takes 1.2.
    """

    seq: int
    subject: str
    data: bytes
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The log as it is now.

    Attributes:
        created_ns: identifies it: a log made anew is another log.
        bytes: what it holds, and `max_bytes` what it may hold; None where only its server knows a bound.
        replicas: how many servers keep it.
        first_ns: when the oldest event that it holds was stored; 0 where it holds none.
    """

    first_seq: int
    last_seq: int
    created_ns: int
    messages: int
    bytes: int
    max_bytes: int | None = None
    replicas: int = 1
    first_ns: int = 0


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """How one process gets on with the log, since it connected.

    Attributes:
        publish_ack_s: from handing an event over to its ack, resends and outages included.
        unacked: events handed over and not acked now.
        behind: how many events the live reader that is furthest behind has not taken yet, as far as the
            log told with the last one it delivered.
    """

    publish_ack_s: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    unacked: int = 0
    behind: int = 0


class LogUnavailableError(CapacityError):
    """The log cannot be reached, or lost its stream; one line says where and what to do."""

    code = "log_unavailable"


class LogFullError(CapacityError):
    """The log is full, or so nearly that only what is under way may still be written."""

    code = "log_full"


class DurabilityError(ClientError):
    """The server does not give what `nats.durability` asks for; says what was found and what to do."""

    code = "durability"


class LogRegressedError(DalSegnoError):
    """The log went backwards: it was emptied, restored or made anew under a reader."""

    code = "log_regressed"


class LogDeniedError(ClientError):
    """The server does not let us do what our role does: we showed the credentials of another."""

    code = "log_denied"
    status = 500


class PayloadTooLargeError(ClientError):
    """An event near the server's `max_payload`; refused before it is published."""

    code = "payload_too_large"
    status = 413


class WrongLastSequenceError(DalSegnoError):
    """`expected_last_seq` was not the last sequence of the subject."""

    code = "wrong_last_sequence"


class OutboxFullError(CapacityError):
    """Too much is posted and not acked yet: the log is away or full, and the backlog is bounded."""

    code = "log_backlog"


class Log(Protocol):
    """The event log."""

    on_change: Callable[[bool], None] | None
    """Called on the event loop with `connected`, whenever that changes."""

    @property
    def connected(self) -> bool:
        """Whether the log answers now. While it does not, posts are kept and readers wait."""
        ...

    @property
    def max_payload(self) -> int:
        """The most bytes one event may have."""
        ...

    @property
    def durability(self) -> Durability:
        """What an acked event survives, as it was found (never only asked for) when this log was made.

        It is checked again whenever the connection is new; a log that gives less by then is not `connected`.
        """
        ...

    @property
    def is_full(self) -> bool:
        """Whether the log has just refused an event for want of room. It is kept, and sent again."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the log acks nothing of what it is given, for some seconds, though it answers questions."""
        ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expected_last_seq: int | None = None,
        waits_while_full: bool = True,
    ) -> int:
        """Store an event and return its sequence; sent again until it is acked.

        With `expected_last_seq`, only if that is the subject's last sequence (0: none). Cancelled, it is
        not sent again; whether it is stored is then unknown.

        Raises:
            PayloadTooLargeError: before anything is sent.
            OutboxFullError: before anything is sent.
            WrongLastSequenceError: the expectation did not hold.
            LogFullError: the log is full, and it is not to be waited for; nothing was stored.
            LogUnavailableError: the log is closed.
            LogRegressedError: the log is not the one, or not as far, as it was.
        """
        ...

    def post(self, subject: str, data: bytes, stored: Callable[[int], None] | None = None) -> None:
        """Store an event without waiting; `stored(seq)` is called on the event loop once it is acked.

        Nobody waits: what is not acked yet is kept, up to a bound, and past it refused.

        Order: events posted by one process are sent in order; one that must be sent again may be
        stored behind later ones, and may be stored twice. Readers keep the first copy by event id.

        Raises:
            PayloadTooLargeError: before anything is sent.
            OutboxFullError: before anything is sent.
            LogUnavailableError: the log is closed.
            LogRegressedError: the log is not the one, or not as far, as it was.
        """
        ...

    def read(self, subjects: Sequence[str], start_seq: int) -> AsyncGenerator[StoredRecord, None]:
        """Every record on `subjects` from `start_seq` on, in order, each once; then live, for ever.

        Survives reconnects and server restarts by itself. Between the log and a slow reader is a bounded
        queue; the log waits when it is full, and nothing is lost. Close it (`contextlib.aclosing`) when
        done with it.

        Raises:
            LogRegressedError: the log is not the one, or not as far, as it was.
            LogUnavailableError: the log is closed.
        """
        ...

    def history(
        self, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        """What the log holds on `subjects` now (up to `end_seq`), in order; then it ends.

        Raises:
            LogRegressedError: the log is not the one, or not as far, as it was.
            LogUnavailableError: the log is closed.
        """
        ...

    async def last(self, subject: str) -> StoredRecord | None:
        """The newest record on one subject, read from the stream's leader.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        ...

    async def state(self) -> LogState:
        """The log as it is now.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        ...

    def stats(self) -> LogStats:
        """What was counted so far; the histogram is the living one, not a copy."""
        ...

    async def drain(self) -> None:
        """Wait until everything posted so far is acked."""
        ...

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        """Tell whoever listens now; it is not stored, and lost while the log is away."""
        ...

    def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """The beats on `subject` from now on, as (subject, data); a slow listener loses the oldest."""
        ...

    async def close(self) -> None:
        """Let go of the connection; what is not acked may or may not be stored."""
        ...
