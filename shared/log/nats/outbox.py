"""The outbox: posted events without an ack, and the schedule of their resends. It does no I/O itself.

Each entry has a number, and its ack carries that number. Only the ack removes an entry. An entry is sent
again if its ack is late, or if the connection is new. After a refusal (of a full log, for example) one
entry alone is sent again, until the log accepts it; then all others follow, in the order of posting.

nats-py's own means do not suffice: its reconnect buffer replays writes that are void by then, and the futures
of its `publish_async` never resolve if a publish is refused.
"""

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shared.errors import DalSegnoError
from shared.log.nats.api import FULL, WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_IN_FLIGHT
from shared.log.port import LogFullError, OutboxFullError
from shared.telemetry import timeline
from shared.telemetry.histogram import SECONDS, Histogram

_LOGGER: Final = logging.getLogger(__name__)

RESEND_AFTER_S: Final = 2.0
_RESEND_AFTER_AT_MOST_S: Final = 30.0
"""The delay doubles each time, so that a slow log does not drown in duplicates."""
_SWEEP_EVERY_S: Final = 0.5
_PROBE_AFTER_S: Final = 0.1
_PROBE_AFTER_AT_MOST_S: Final = 0.5
_STALLED_AFTER_S: Final = 3.0
"""A healthy log stores an event in milliseconds, a very busy one in seconds."""
_REFUSAL_VALID_S: Final = 2.0
"""The time for which a refusal counts if no entry is retried: the log may have capacity again."""
FULL_MESSAGE: Final = "the log is full: no new requests are accepted; try again later"


class PublishRefused(Exception):  # noqa: N818 - a reply that the publisher handles
    """The log refused an event for good; `sent` is the number of times it had been sent."""

    def __init__(self, code: int, sent: int) -> None:
        super().__init__(f"refused with {code}, sent {sent} times")
        self.code = code
        self.sent = sent


class OutboxEntry:
    """A posted event."""

    __slots__ = (
        "data",
        "due",
        "expected",
        "failed",
        "first_sent_s",
        "posted_s",
        "sent",
        "stored",
        "subject",
        "waits",
    )

    def __init__(
        self,
        subject: str,
        data: bytes,
        stored: Callable[[int], None] | None,
        failed: Callable[[Exception], None] | None,
        expected: int | None,
        waits: bool,
    ) -> None:
        self.subject = subject
        self.data = data
        self.stored = stored
        self.failed = failed
        self.expected = expected
        self.waits = waits
        self.posted_s = time.monotonic()  # the loop's clock ticks in milliseconds
        self.sent = 0
        self.first_sent_s = 0.0
        self.due = 0.0


@dataclass(slots=True)
class _Drain:
    """A wait for all entries up to `number`.

    Attributes:
        left: the number of those entries without an ack that no earlier drain waits for.
    """

    number: int
    left: int
    done: "asyncio.Future[None]"


class Outbox:
    """The entries by number, in the order of posting. `transmit` must not wait and must not raise.

    Attributes:
        publish_ack_s: the time from posting to the ack, of all acked events.
    """

    def __init__(
        self,
        transmit: Callable[[int, OutboxEntry], None],
        *,
        max_entries: int = 65_536,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.publish_ack_s = Histogram.over(SECONDS)
        self._timeline = timeline.recording()
        self._refusal: int | None = None
        self._refused_s = 0.0
        self._answered_s = 0.0
        self._stalled_s = -math.inf
        self._transmit = transmit
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._entries: dict[int, OutboxEntry] = {}
        self._bytes = 0
        self._number = 0
        self._online = False
        self._probed: int | None = None  # while the log refuses: the entry that is retried
        self._probe_after_s = _PROBE_AFTER_S
        self._probe_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._drains: list[_Drain] = []  # in the order of their numbers
        self._awaited = 0  # entries that some drain waits for
        self._failure: DalSegnoError | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def post(
        self,
        subject: str,
        data: bytes,
        stored: Callable[[int], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
        expected: int | None = None,
        waits: bool = True,
    ) -> int:
        """Add an event and return its number. With `waits` False it fails if the log is full.

        Raises:
            OutboxFullError: the backlog has reached its limit.
            LogFullError: other events already wait for the full log, and `waits` is False.
            DalSegnoError: the error that `fail` was called with.
        """
        if self._failure is not None:
            raise self._failure
        if len(self._entries) >= self._max_entries or self._bytes + len(data) > self._max_bytes:
            raise OutboxFullError(
                f"{len(self._entries)} events ({self._bytes} bytes) are posted and not acked by the log, the "
                f"limit is {self._max_entries} ({self._max_bytes} bytes): is it away or full? Try again later"
            )
        if self._probed is not None and self._refusal in FULL and not waits:
            raise LogFullError(FULL_MESSAGE)
        self._number += 1
        entry = OutboxEntry(subject, data, stored, failed, expected, waits)
        self._entries[self._number] = entry
        self._bytes += len(data)
        if self._online and self._probed is None:
            self._send(self._number, entry)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep)
        return self._number

    def acked(self, number: int, seq: int) -> bytes | None:
        """Remove a stored entry and return its data; None for the ack of a duplicate."""
        if number == self._probed:
            self._probed = None
            self._probe_after_s = _PROBE_AFTER_S
            _LOGGER.info("the log accepts events again; %d wait", len(self._entries) - 1)
        self._refusal = None
        self._answered_s, self._stalled_s = self._loop.time(), -math.inf
        entry = self._remove(number)
        if entry is not None:
            now_s = time.monotonic()
            self.publish_ack_s.observe(now_s - entry.posted_s)
            if self._timeline is not None:
                self._timeline.hop("publish", entry.subject, seq, entry.posted_s, now_s)
            if entry.stored is not None:
                self._call(entry.stored, seq)
        if self._probed is None and self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
            self._send_all()
        return entry.data if entry is not None else None

    def refused(self, number: int, code: int, description: str) -> None:
        """Handle an entry that the log did not store: its condition failed, or the log cannot store now."""
        self._answered_s = self._loop.time()
        entry = self._entries.get(number)
        if entry is None:
            return
        if entry.expected is not None and code in {WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_IN_FLIGHT}:
            self._give_back(number, entry, code)
            return
        self._refusal, self._refused_s = code, self._loop.time()
        if code in FULL and not entry.waits and entry.sent == 1:  # else an earlier copy may be stored
            self._give_back(number, entry, code)
        elif self._probed is None:
            _LOGGER.warning(
                "the log refuses events (%s, code %d, first on %s): retrying until it accepts them",
                description,
                code,
                entry.subject,
            )
            self._probed = number
            self._probe_timer = self._loop.call_later(self._probe_after_s, self._probe)

    @property
    def refusal(self) -> int | None:
        """The code of the log's latest refusal, unless it has accepted an event since."""
        is_old = self._probed is None and self._loop.time() > self._refused_s + _REFUSAL_VALID_S
        return None if is_old else self._refusal

    @property
    def is_stalled(self) -> bool:
        """True if the log has answered no event for some seconds although it is connected."""
        self._note_stall()
        return self._loop.time() - self._stalled_s < _REFUSAL_VALID_S

    def discard(self, number: int) -> None:
        """Remove an entry that no publisher waits for any more."""
        self._note_stall()  # the entry may be the only sign of a stall
        self._remove(number)

    def online(self) -> None:
        """Send all entries on a new connection: those sent on the old one may be lost."""
        self._online = True
        self._answered_s = self._loop.time()
        self._stop_probing()
        self._send_all()

    def offline(self) -> None:
        """Keep all entries, and send nothing until `online`."""
        self._online = False
        self._stop_probing()

    def fail(self, failure: DalSegnoError) -> None:
        """Fail all waiting and all later publishers with `failure`."""
        self._failure = failure
        self.offline()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        entries, self._entries, self._bytes = self._entries, {}, 0
        if entries:
            _LOGGER.error("%d events were posted and not acked: %s", len(entries), failure)
        for entry in entries.values():
            if entry.failed is not None:
                self._call(entry.failed, failure)
        for drain in self._drains:
            drain.done.set_exception(failure)
            drain.done.exception()  # marks it as retrieved, for a drain whose waiter has gone
        self._drains.clear()
        self._awaited = 0

    async def drain(self) -> None:
        """Wait until everything posted so far is acked."""
        if self._failure is not None:
            raise self._failure
        if not self._entries:
            return
        if len(self._entries) > self._awaited:
            news = len(self._entries) - self._awaited
            self._drains.append(_Drain(self._number, news, self._loop.create_future()))
            self._awaited += news
        # Else nothing was posted since the last drain: thousands of drains may share it.
        await asyncio.shield(self._drains[-1].done)

    def _note_stall(self) -> None:
        if not self._online or not self._entries:
            return
        now, oldest = self._loop.time(), next(iter(self._entries.values()))
        waits_s = now - max(self._answered_s, oldest.first_sent_s)
        if oldest.sent and self._probed is None and waits_s > _STALLED_AFTER_S:
            self._stalled_s = now

    def _send(self, number: int, entry: OutboxEntry) -> None:
        entry.sent += 1
        if entry.sent == 1:
            entry.first_sent_s = self._loop.time()
        entry.due = self._loop.time() + min(RESEND_AFTER_S * 2 ** (entry.sent - 1), _RESEND_AFTER_AT_MOST_S)
        self._transmit(number, entry)

    def _send_all(self) -> None:
        for number, entry in self._entries.items():
            self._send(number, entry)

    def _sweep(self) -> None:
        self._sweep_timer = None
        if not self._entries:
            return
        self._sweep_timer = self._loop.call_later(_SWEEP_EVERY_S, self._sweep)
        if not self._online or self._probed is not None:
            return
        now = self._loop.time()
        for number, entry in self._entries.items():
            if entry.due <= now:
                self._send(number, entry)

    def _probe(self) -> None:
        """Send the oldest entry alone, which changes if a conditional entry fails."""
        self._probe_after_s = min(2 * self._probe_after_s, _PROBE_AFTER_AT_MOST_S)
        self._probe_timer = self._loop.call_later(self._probe_after_s, self._probe)
        for number, entry in self._entries.items():
            self._probed = number
            self._send(number, entry)
            return
        self._stop_probing()  # nothing is left to try

    def _stop_probing(self) -> None:
        self._probed = None
        self._probe_after_s = _PROBE_AFTER_S
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None

    def _remove(self, number: int) -> OutboxEntry | None:
        entry = self._entries.pop(number, None)
        if entry is None:
            return None
        self._bytes -= len(entry.data)
        self._drained(number)
        return entry

    def _drained(self, number: int) -> None:
        """Complete the drains that waited for this entry only."""
        place = bisect_left(self._drains, number, key=lambda drain: drain.number)
        if place == len(self._drains):
            return  # posted after all of them
        self._drains[place].left -= 1
        self._awaited -= 1
        while self._drains and not self._drains[0].left:
            self._drains.pop(0).done.set_result(None)

    def _give_back(self, number: int, entry: OutboxEntry, code: int) -> None:
        self._remove(number)
        assert entry.failed is not None
        self._call(entry.failed, PublishRefused(code, entry.sent))

    def _call(self, callback: Callable[[Any], None], argument: object) -> None:
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001 - a bug in a callback must not stop the read loop
            self._loop.call_exception_handler(
                {"message": "a publisher's callback failed", "exception": error}
            )
