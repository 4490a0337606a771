"""Log reader of a simulated process: a simulated consumer on the server, and the real cursor.

The consumer delivers the records that its reader wants, in order. A delivery may be lost or repeated, and the
consumer is gone after each disconnect. The cursor (`shared.log.nats.cursor`) then stops trusting it, and
another consumer is created at the cursor's position. So each record is taken once, in order.
"""

import random
from collections.abc import Callable
from typing import Final

from shared.log.nats.cursor import Cursor
from shared.log.port import StoredRecord
from shared.subjects import Address
from tests.simulation.log import SimLog

AHEAD: Final = 16
"""So many records may be delivered and not taken."""
AT_ONCE: Final = 4


class Reader:
    """One process's reader; `taken` is the last record that it took."""

    def __init__(self, log: SimLog, wants: Callable[[Address], bool], start: int) -> None:
        self.taken = start
        self._log = log
        self._wants = wants
        self._at = start  # how far the consumer is
        self._deliveries = 0
        self._cursor = Cursor(
            start + 1, None, lambda _: None, max_pending=2 * AHEAD, max_pending_bytes=1_000_000_000
        )

    @property
    def reached(self) -> int:
        """The last record that was delivered."""
        return self._cursor.reached

    @property
    def has_records(self) -> bool:
        """True if there is a record to take."""
        return bool(self._cursor._queue)

    @property
    def has_deliveries(self) -> bool:
        """True if the server can deliver a record now."""
        self._see_to_consumer()
        return len(self._cursor._queue) < AHEAD and self._next() is not None

    @property
    def is_behind(self) -> bool:
        """True if the log has a record for it that it has not taken."""
        return self.has_records or any(map(self._wants, self._log.addresses[self._cursor.position :]))

    def disconnect(self) -> None:
        """The consumer is gone; delivered records stay."""
        self._cursor.fail("the connection is new")

    def deliver(self, chance: random.Random, p_lost: float) -> str:
        """Deliver the next few records; return what went wrong with one of them."""
        self._see_to_consumer()
        for _ in range(chance.randint(1, AT_ONCE)):
            if (record := self._next()) is None:
                break
            self._at = record.seq
            self._deliveries += 1
            if chance.random() < p_lost:
                return "lost on its way to a reader"
            times = 2 if chance.random() < p_lost else 1
            reply = f"$JS.ACK.DS_LOG.c.1.{record.seq}.{self._deliveries}.{record.time_ns}.0"
            for _ in range(times):
                self._cursor.deliver(record.subject.encode(), reply.encode(), record.data)
            if times > 1:
                return "delivered twice"
        return ""

    def beat(self) -> None:
        """Send the consumer's heartbeat with its delivery count, so that a loss at the end is noticed."""
        told = f"Nats-Last-Consumer: {self._deliveries}\r\nNats-Last-Stream: {self._at}"
        self._cursor.control(b"", f"NATS/1.0 100 Idle Heartbeat\r\n{told}\r\n\r\n".encode())

    def take(self) -> StoredRecord:
        """Take the next record."""
        record = self._cursor.take()
        assert record is not None, "asked for a record where there is none"
        assert record == self._log.records[record.seq - 1], (
            f"record {record.seq} was read otherwise than stored"
        )
        missed = [
            seq for seq in range(self.taken + 1, record.seq) if self._wants(self._log.addresses[seq - 1])
        ]
        assert record.seq > self.taken, f"record {record.seq} was read behind {self.taken}"
        assert not missed, f"the records {missed} were not read"
        self.taken = record.seq
        return record

    def _see_to_consumer(self) -> None:
        """Create a consumer at the cursor's position if there is none that is trusted."""
        if self._cursor.fault is None:
            return
        self._cursor.attaching()
        self._at, self._deliveries = self._cursor.position, 0
        self._cursor.attached(0)  # how many there are is only for meters

    def _next(self) -> StoredRecord | None:
        addresses, wants = self._log.addresses, self._wants
        while self._at < len(addresses):
            if wants(addresses[self._at]):
                return self._log.records[self._at]
            self._at += 1
        return None
