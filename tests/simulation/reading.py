"""How a simulated process reads the log: a consumer on the server's side, and the real cursor on ours.

The consumer delivers what its reader wants, in order; but what it delivers may be lost on the way, or come
twice, and each time the connection breaks it is gone. Then the cursor (`shared.log.nats.cursor`) does not
trust it
any more, and another one is made, from the cursor's position on. So each record is taken once, in order.
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
    """One process's way to the records; `taken` is the last one that it took."""

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
        """Whether there is a record to take."""
        return bool(self._cursor._queue)

    @property
    def has_deliveries(self) -> bool:
        """Whether the server has something to deliver now."""
        self._see_to_consumer()
        return len(self._cursor._queue) < AHEAD and self._next() is not None

    @property
    def is_behind(self) -> bool:
        """Whether the log has a record for it that it has not taken."""
        return self.has_records or any(map(self._wants, self._log.addresses[self._cursor.position :]))

    def disconnect(self) -> None:
        """The consumer is gone; what it has delivered is there."""
        self._cursor.fail("the connection is new")

    def deliver(self, chance: random.Random, p_lost: float) -> str:
        """The next few records; what went wrong with one of them."""
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
        """The consumer's heartbeat: it says how much it has delivered, so that a loss at the end is seen."""
        told = f"Nats-Last-Consumer: {self._deliveries}\r\nNats-Last-Stream: {self._at}"
        self._cursor.control(b"", f"NATS/1.0 100 Idle Heartbeat\r\n{told}\r\n\r\n".encode())

    def take(self) -> StoredRecord:
        """The next record."""
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
        """Where there is none that is trusted, another one, from the cursor's position on."""
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
