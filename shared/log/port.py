"""The interface of the event log, with its records, statistics and errors.

Readers are ordered cursors without acks. Publishers track each event to its ack. There are two
implementations, `shared.log.nats.jetstream.JetStreamLog` and `shared.log.memory.MemoryLog`, under one
contract suite (`tests/shared/log/contract.py`).
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec

from shared.errors import CapacityError, ClientError, DalSegnoError
from shared.telemetry.histogram import SECONDS, Histogram

Durability: TypeAlias = Literal["process", "host", "cluster"]
"""The failure that an acked event survives: of any process, of the server's machine, of one of three
servers."""


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """One event in the log: its position, its subject, its bytes, and the time at which it was stored.

    A replay makes 100,000 records a second: a Struct takes 0.1 us, a frozen dataclass 1.2 us.
    """

    seq: int
    subject: str
    data: bytes
    time_ns: int


class MissingRecords(msgspec.Struct, frozen=True):
    """A range of positions whose records were lost; `reason` names the file."""

    first_seq: int
    last_seq: int
    reason: str

    def __str__(self) -> str:
        which = (
            f"record {self.first_seq} is"
            if self.first_seq == self.last_seq
            else (f"records {self.first_seq} to {self.last_seq} are")
        )
        return f"{which} missing: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The current state of the log.

    Attributes:
        created_ns: the creation time, which identifies the log: a recreated log is another log.
        bytes: the size of all events.
        max_bytes: the maximum size; None if only the server has a limit.
        replicas: the number of servers that store the log.
        first_ns: the time at which the oldest event was stored; 0 in an empty log.
        consumers: the number of readers that the server keeps.
        max_consumers: the most that it keeps; None if only the server has a limit.
        missing: lost records; known only for a data dir at rest.
    """

    first_seq: int
    last_seq: int
    created_ns: int
    messages: int
    bytes: int
    max_bytes: int | None = None
    replicas: int = 1
    first_ns: int = 0
    consumers: int = 0
    max_consumers: int | None = None
    missing: tuple[MissingRecords, ...] = ()


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """One process's statistics of the log since it connected.

    Attributes:
        publish_ack_s: the time from posting an event to its ack, including resends and outages.
        unacked: the number of posted events without an ack.
        behind: the lag, in events, of the slowest live reader, by the log's last delivery to it.
    """

    publish_ack_s: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    unacked: int = 0
    behind: int = 0


class LogUnavailableError(CapacityError):
    """The log cannot be reached, or its stream is gone."""

    code = "log_unavailable"


class LogFullError(CapacityError):
    """The log is full, or its remaining capacity is reserved for running requests."""

    code = "log_full"


class DurabilityError(ClientError):
    """The server provides less durability than `nats.durability` requires."""

    code = "durability"


class LogRegressedError(DalSegnoError):
    """The log lost events that this process has seen: it was emptied, restored or recreated."""

    code = "log_regressed"


class LogDeniedError(ClientError):
    """The server denies an operation that the role needs: the credentials belong to another role."""

    code = "log_denied"
    status = 500


class PayloadTooLargeError(ClientError):
    """An event exceeds the server's `max_payload`, less a margin. It was not published."""

    code = "payload_too_large"
    status = 413


class WrongLastSequenceError(DalSegnoError):
    """`expected_last_seq` is not the last sequence number of the subject."""

    code = "wrong_last_sequence"


class OutboxFullError(CapacityError):
    """The backlog of posted events without an ack has reached its limit: the log is away or full."""

    code = "log_backlog"


class Log(Protocol):
    """The event log."""

    on_change: Callable[[bool], None] | None
    """Called on the event loop with the new value of `connected` when it changes."""

    @property
    def connected(self) -> bool:
        """True while the log answers. While it does not, posts are kept and readers wait."""
        ...

    @property
    def max_payload(self) -> int:
        """The maximum size of one event in bytes."""
        ...

    @property
    def durability(self) -> Durability:
        """The durability of an acked event, as verified (not only as requested) when this log was opened.

        It is verified again after each reconnect. A log that then provides less is not `connected`.
        """
        ...

    @property
    def is_full(self) -> bool:
        """True if the log just refused an event because it is full. The event is kept and sent again."""
        ...

    @property
    def is_stalled(self) -> bool:
        """True if the log has acked nothing for some seconds although it answers queries."""
        ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expected_last_seq: int | None = None,
        waits_while_full: bool = True,
    ) -> int:
        """Store an event and return its sequence number; the event is sent again until it is acked.

        A cancelled call sends no more, and leaves open whether the event was stored.

        Args:
            subject: the event's subject.
            data: the event's bytes.
            expected_last_seq: store the event only if this is the subject's last sequence number (0: none).
            waits_while_full: wait while the log is full, instead of failing.

        Raises:
            PayloadTooLargeError: before anything is sent.
            OutboxFullError: before anything is sent.
            WrongLastSequenceError: the subject has another last sequence number.
            LogFullError: the log is full and `waits_while_full` is false; nothing was stored.
            LogUnavailableError: the log is closed.
            LogRegressedError: the log lost events or was recreated.
        """
        ...

    def post(self, subject: str, data: bytes, stored: Callable[[int], None] | None = None) -> None:
        """Store an event without waiting; `stored(seq)` is called on the event loop once it is acked.

        Events without an ack are kept up to a limit; beyond it, further events are refused.

        Events of one process are sent in order. An event that has to be sent again may be stored after later
        ones, and may be stored twice. Readers keep the first copy by event id.

        Raises:
            PayloadTooLargeError: before anything is sent.
            OutboxFullError: before anything is sent.
            LogUnavailableError: the log is closed.
            LogRegressedError: the log lost events or was recreated.
        """
        ...

    def read(self, subjects: Sequence[str], start_seq: int) -> AsyncGenerator[StoredRecord, None]:
        """Iterate over all records on `subjects` from `start_seq` on, in order, each once, without end.

        The iteration continues across reconnects and server restarts. A bounded queue lies between the log
        and a slow reader; the log waits while the queue is full, so nothing is lost. Close the iterator
        (`contextlib.aclosing`) when it is no longer needed.

        Raises:
            LogRegressedError: the log lost events or was recreated.
            LogUnavailableError: the log is closed.
        """
        ...

    def history(
        self, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        """Iterate over the records that the log now holds on `subjects` (up to `end_seq`), in order.

        Raises:
            LogRegressedError: the log lost events or was recreated.
            LogUnavailableError: the log is closed.
        """
        ...

    async def last(self, subject: str) -> StoredRecord | None:
        """Return the newest record on one subject, read from the stream's leader.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        ...

    async def first_after(self, subject: str, seq: int) -> StoredRecord | None:
        """Return the first record on one subject after `seq`; wait while the log does not answer.

        Raises:
            LogUnavailableError: the log is closed.
            LogRegressedError: the log lost events or was recreated.
        """
        ...

    async def state(self) -> LogState:
        """Return the current state of the log.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        ...

    def stats(self) -> LogStats:
        """Return the statistics so far; the histogram is shared, not copied."""
        ...

    async def drain(self) -> None:
        """Wait until everything posted so far is acked."""
        ...

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        """Send a heartbeat to all current listeners. It is not stored, and is lost while the log is away."""
        ...

    def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Iterate over new heartbeats on `subject`, as (subject, data); a slow listener loses the oldest."""
        ...

    async def close(self) -> None:
        """Close the connection. Events without an ack may or may not be stored."""
        ...
