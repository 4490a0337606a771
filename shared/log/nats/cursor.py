"""A cursor: where one reader is in the log, and what was delivered to it but not taken yet. No I/O.

The log delivers by one short-lived consumer after another. The cursor, not the consumer, knows the position:
it moves in the very call that hands a record to the queue, so nothing can be lost between the two. Whenever a
consumer cannot be trusted any more (`fault`), the reader makes a new one from `position + 1`.

Flow control is the bound: the log sends no more than a window ahead (32 MiB at most), and the window
opens again only when the reader has *taken* what came before; until then it is the log that waits. The
queue's own bound lies above that and is for a log that does not keep to it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from shared.log.port import StoredRecord

_SILENCE_TICKS: Final = 2


class Cursor:
    """One reader's position and queue. With `end_seq` it finishes there, or where the log ends before.

    Of a log that several servers keep (`is_replicated`), who delivers may be behind: that nothing is left
    there does not say that nothing is. Then it only `seems_finished`, and who leads the log is to be asked.
    """

    def __init__(
        self,
        start_seq: int,
        end_seq: int | None,
        answer: Callable[[str], None],
        *,
        max_pending: int,
        max_pending_bytes: int,
        is_replicated: bool = False,
    ) -> None:
        self.position = start_seq - 1
        self.reached = 0  # the last position a record came from
        self.reached_ns = b"0"  # and when that one was stored, which no other record was
        self.end_seq = end_seq
        self.finished = end_seq is not None and end_seq < start_seq
        self.seems_finished = False
        self.fault: str | None = "no consumer yet"
        self._answer = answer
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._is_replicated = is_replicated
        # Records, and between them the flow-control requests to answer once those before them are taken.
        self._queue: deque[StoredRecord | str] = deque()
        self._queued_bytes = 0
        self._delivered = 0  # the consumer's own count
        self._pending: int | bytes = 0  # what the log still had to deliver, as it said last
        self._wants: Callable[[bytes], object] | None = None
        self._wants_until = 0
        self._heard = False
        self._silent_ticks = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def behind(self) -> int:
        """How many records are not taken yet, as far as the log told."""
        return int(self._pending) + sum(not isinstance(item, str) for item in self._queue)

    def attached(self, num_pending: int) -> None:
        """A new consumer delivers from `position + 1` on; `num_pending` records match now."""
        if self._delivered == 0:  # else what it delivered meanwhile tells of a later moment
            self._pending = num_pending
        if self.end_seq is not None and num_pending == 0:
            self._come_to_end()

    def attaching(self, wants: Callable[[bytes], object] | None = None, until_seq: int = 0) -> None:
        """A new consumer is about to be made: it counts from 1.

        With `wants` it is to deliver more than is asked for, up to `until_seq`, and is sifted here.
        """
        self._wants = wants
        self._wants_until = until_seq
        self.fault = None
        self._delivered = 0
        self._heard = True
        self._silent_ticks = 0

    def deliver(self, subject: bytes, reply: bytes, data: bytes) -> None:
        """Take in one message of the consumer."""
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
        if len(self._queue) >= self._max_pending or self._queued_bytes >= self._max_pending_bytes:
            self.fail(f"{len(self._queue)} records wait for a slow reader")
            return
        self._delivered += 1
        self._pending = tokens[at + 3]
        is_news = seq > self.position  # a server that is behind begins where it ends, if that is further back
        if is_news:
            self.position = self.reached = seq
            self.reached_ns = tokens[at + 2]
        if is_news and (self._wants is None or self._wants(subject)):
            self._queued_bytes += len(data)
            # Whoever may publish at all may do so on a subject that is no text: readers are to see that too.
            name = subject.decode(errors="replace")
            self._queue.append(StoredRecord(seq, name, data, int(tokens[at + 2])))
        self.seems_finished = False
        if self.end_seq is not None and seq == self.end_seq:
            self.finished = True
        elif self.end_seq is not None and tokens[at + 3] == b"0":
            self._come_to_end()
        elif self._wants is not None and seq >= self._wants_until:
            self.fault = "the backlog is read: from here on a consumer of what is wanted alone"
        self._wake()

    def control(self, reply: bytes, header: bytes) -> None:
        """Take in a message of the consumer without a record: a heartbeat or a flow-control request."""
        self._heard = True
        if self.fault is not None or self.finished:
            return
        if reply:
            self._flow_control(reply.decode())
            return
        fields = _fields(header)
        stalled = fields.get(b"nats-consumer-stalled")
        if stalled is not None:
            if not self._queue:  # what the log waits for was taken: our answer got lost
                self._answer(stalled.decode())
            return
        if int(fields.get(b"nats-last-consumer", b"0")) != self._delivered:
            self.fail("a heartbeat counts more deliveries than arrived")
        elif self.end_seq is not None and int(fields.get(b"nats-last-stream", b"0")) >= self.end_seq:
            self._finish()  # what still was pending at the start has left the log meanwhile

    def tick(self) -> None:
        """Called once a second: two of them without a sign of life are a fault."""
        self._silent_ticks = 0 if self._heard else self._silent_ticks + 1
        self._heard = False
        if self._silent_ticks >= _SILENCE_TICKS and self.fault is None:
            self.fail("no heartbeat")

    def fail(self, reason: str) -> None:
        """The consumer is not to be trusted from here on."""
        self.fault = reason
        self._wake()

    def take(self) -> StoredRecord | None:
        """The next record, if one is there."""
        queue = self._queue
        while queue:
            item = queue.popleft()
            if isinstance(item, str):
                self._answer(item)
                continue
            self._queued_bytes -= len(item.data)
            return item
        return None

    async def wait(self) -> None:
        """Wait for a record, a fault or the end, or what seems to be one."""
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
            self._answer(reply)

    def _come_to_end(self) -> None:
        """Who delivers has nothing more."""
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
    """The fields of a NATS header block, names in lower case."""
    fields = {}
    for line in header.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    return fields
