"""A cursor: one reader's position in the log, and the queue of records delivered to it. No I/O.

The log delivers through a series of short-lived consumers, or by single requests while the server has no
consumer left (`shared.log.nats.polling`). The position belongs to the cursor and not to a
consumer. It moves in the same call that queues a record, so no record can be lost in between. If a consumer
is no longer reliable (`fault`), the reader makes a new one from `position + 1`.

Flow control limits the queue: the log sends at most a window ahead (up to 32 MiB), and the window opens again
only when the reader has *taken* the earlier records. The queue's own limit is higher, and guards against a
log that ignores flow control.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from shared.log.port import StoredRecord

_SILENCE_TICKS: Final = 2


class Cursor:
    """One reader's position and queue. With `end_seq` it finishes there, or at the end of the log before.

    With replicas (`is_replicated`) the delivering server may lag behind the leader, so its end need not be
    the log's end. Then the cursor only `seems_finished`, and its reader has to ask the leader.
    """

    def __init__(
        self,
        start_seq: int,
        end_seq: int | None,
        reply: Callable[[str], None],
        *,
        max_pending: int,
        max_pending_bytes: int,
        is_replicated: bool = False,
    ) -> None:
        self.position = start_seq - 1
        self.reached = 0  # the position of the last record
        self.reached_ns = b"0"  # its time of storage, which identifies the record
        self.end_seq = end_seq
        self.finished = end_seq is not None and end_seq < start_seq
        self.seems_finished = False
        self.fault: str | None = "no consumer yet"
        self._reply = reply
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._is_replicated = is_replicated
        # Records, and flow-control requests, which are answered once the records before them are taken.
        self._queue: deque[StoredRecord | str] = deque()
        self._queued_bytes = 0
        self._delivered = 0  # the consumer's own count
        self._pending: int | bytes = 0  # undelivered records, by the log's last message
        self._wants: Callable[[bytes], object] | None = None
        self._wants_until = 0
        self._heard = False
        self._silent_ticks = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def behind(self) -> int:
        """The number of records not taken yet, by the log's last message."""
        return int(self._pending) + sum(not isinstance(item, str) for item in self._queue)

    def attached(self, num_pending: int) -> None:
        """Note that a new consumer delivers from `position + 1` on; `num_pending` records match now."""
        if self._delivered == 0:  # else a delivery has already reported a later number
            self._pending = num_pending
        if self.end_seq is not None and num_pending == 0:
            self._reach_end()

    def attaching(self, wants: Callable[[bytes], object] | None = None, until_seq: int = 0) -> None:
        """Prepare for a new consumer, which counts its deliveries from 1.

        With `wants`, the consumer has a wider filter up to `until_seq`, and the cursor drops other records.
        """
        self._wants = wants
        self._wants_until = until_seq
        self.fault = None
        self._delivered = 0
        self._heard = True
        self._silent_ticks = 0

    def deliver(self, subject: bytes, reply: bytes, data: bytes) -> None:
        """Process one message of the consumer."""
        self._heard = True
        if self.fault is not None or self.finished:
            return
        # $JS.ACK.<stream>.<consumer>.<times>.<stream seq>.<consumer seq>.<ns>.<pending>, or with
        # <domain>.<account> before the stream and perhaps a random token at the end (NATS ADR-15).
        tokens = reply.split(b".")
        at = 5 if len(tokens) == 9 else 7
        if int(tokens[at + 1]) != self._delivered + 1:
            self.fail(f"delivery {int(tokens[at + 1])} after {self._delivered}")
            return
        seq = int(tokens[at])
        if self.end_seq is not None and seq > self.end_seq:
            self._finish()
            return
        if self.is_crowded:
            self.fail(f"{len(self._queue)} records wait for a slow reader")
            return
        self._delivered += 1
        self._pending = tokens[at + 3]
        is_news = seq > self.position  # a lagging server may start before the requested position
        if is_news:
            self.position = self.reached = seq
            self.reached_ns = tokens[at + 2]
        if is_news and (self._wants is None or self._wants(subject)):
            self._queued_bytes += len(data)
            # A publisher may use a subject that is not valid text; readers see that record as well.
            name = subject.decode(errors="replace")
            self._queue.append(StoredRecord(seq, name, data, int(tokens[at + 2])))
        self.seems_finished = False
        if self.end_seq is not None and seq == self.end_seq:
            self.finished = True
        elif self.end_seq is not None and tokens[at + 3] == b"0":
            self._reach_end()
        elif self._wants is not None and seq >= self._wants_until:
            self.fault = "the backlog is read: a consumer with the reader's own filter follows"
        self._wake()

    @property
    def is_crowded(self) -> bool:
        """True if no more records may be queued before the reader takes some."""
        return len(self._queue) >= self._max_pending or self._queued_bytes >= self._max_pending_bytes

    def polled(self, seq: int, record: StoredRecord | None, last_seq: int) -> None:
        """Process the answer to a request for the record at `seq`; None: there is none, or not for us.

        The log ends at `last_seq`.
        """
        self.position = seq
        self._pending = last_seq - seq
        if record is not None:
            self.reached, self.reached_ns = seq, b"%d" % record.time_ns
            self._queued_bytes += len(record.data)
            self._queue.append(record)
        self._heard = True
        self.finished = self.end_seq is not None and seq >= self.end_seq
        if record is not None or self.finished:
            self._wake()

    def control(self, reply: bytes, header: bytes) -> None:
        """Process a message of the consumer without a record: a heartbeat or a flow-control request."""
        self._heard = True
        if self.fault is not None or self.finished:
            return
        if reply:
            self._flow_control(reply.decode())
            return
        fields = _fields(header)
        stalled = fields.get(b"nats-consumer-stalled")
        if stalled is not None:
            if not self._queue:  # all records were taken, so our reply was lost
                self._reply(stalled.decode())
            return
        if int(fields.get(b"nats-last-consumer", b"0")) != self._delivered:
            self.fail("a heartbeat counts more deliveries than arrived")
        elif self.end_seq is not None and int(fields.get(b"nats-last-stream", b"0")) >= self.end_seq:
            self._finish()  # the records that were pending at the start have expired

    def tick(self) -> None:
        """Check for messages; called once a second. Two calls without a message are a fault."""
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = False
        if self._silent_ticks >= _SILENCE_TICKS and self.fault is None:
            self.fail("no heartbeat")

    def fail(self, reason: str) -> None:
        """Mark the consumer as unreliable."""
        self.fault = reason
        self._wake()

    def take(self) -> StoredRecord | None:
        """Return the next record, or None if the queue is empty."""
        queue = self._queue
        while queue:
            item = queue.popleft()
            if isinstance(item, str):
                self._reply(item)
                continue
            self._queued_bytes -= len(item.data)
            return item
        return None

    async def wait(self) -> None:
        """Wait for a record, a fault, or the end or apparent end."""
        if self._queue or self.fault is not None or self.finished or self.seems_finished:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _flow_control(self, reply: str) -> None:
        if self._queue:
            self._queue.append(reply)
        else:
            self._reply(reply)

    def _reach_end(self) -> None:
        """Note that the delivering server has no more records."""
        self.finished = not self._is_replicated
        self.seems_finished = self._is_replicated
        self._wake()

    def _finish(self) -> None:
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _fields(header: bytes) -> dict[bytes, bytes]:
    """Return the fields of a NATS header block, with names in lower case."""
    fields = {}
    for line in header.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    return fields
