"""The log in memory, for tests, simulations, and execution in one process.

Any number of `MemoryLog`s, one per simulated process, share a `MemoryStore`. The store can be stopped,
started, filled and recreated; the logs then behave as those on JetStream.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared.errors import DalSegnoError
from shared.log.port import (
    Durability,
    LogFullError,
    LogRegressedError,
    LogState,
    LogStats,
    LogUnavailableError,
    OutboxFullError,
    StoredRecord,
    WrongLastSequenceError,
)
from shared.log.publish_checks import PublishChecks
from shared.subjects import Subjects
from shared.telemetry.histogram import SECONDS, Histogram

_MAX_HEARTBEATS = 1024


@dataclass(slots=True, eq=False)
class _Post:
    subject: str
    data: bytes
    expected: int | None
    stored: Callable[[int], None] | None
    failed: Callable[[DalSegnoError], None] | None
    waits: bool = True
    posted_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class _Reader:
    subjects: Sequence[str]
    position: int


class MemoryStore:
    """The records of one log. `clock` returns the time of storage (nanoseconds since 1970)."""

    def __init__(
        self,
        subjects: Subjects | None = None,
        *,
        max_payload: int = 1024 * 1024,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        durability: Durability = "process",
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.subjects = subjects or Subjects()
        self.max_payload = max_payload
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.durability: Durability = durability
        self.records: list[StoredRecord] = []
        self.forgotten = 0
        self.stalls = False
        self.created_ns = clock()
        self._clock = clock
        self._running = True
        self._logs: set[MemoryLog] = set()

    @property
    def running(self) -> bool:
        return self._running

    def stop(self) -> None:
        """Become unreachable for all logs, and keep the records."""
        self._running = False
        for log in list(self._logs):
            log.server_changed()

    def start(self) -> None:
        self._running = True
        for log in list(self._logs):
            log.server_changed()

    def recreate(self) -> None:
        """Delete all records and become another log of the same name."""
        self.records.clear()
        self.forgotten = 0
        self.created_ns = max(self._clock(), self.created_ns + 1)
        for log in list(self._logs):
            log.server_changed()

    def forget(self, seq: int) -> None:
        """Drop the records up to `seq` for all logs, as if they had expired. `records` still has them."""
        self.forgotten = seq

    def stall(self) -> None:
        """Accept events but ack none of them until `unstall`."""
        self.stalls = True

    def unstall(self) -> None:
        self.stalls = False
        for log in list(self._logs):
            log.server_changed()

    def set_max_messages(self, max_messages: int | None) -> None:
        """Limit the number of records; None means no limit."""
        self.max_messages = max_messages
        for log in list(self._logs):
            log.server_changed()

    @property
    def is_full(self) -> bool:
        has_all = self.max_messages is not None and len(self.records) >= self.max_messages
        return has_all or (self.max_bytes is not None and self.nbytes >= self.max_bytes)

    @property
    def nbytes(self) -> int:
        return sum(len(record.subject) + len(record.data) for record in self.records)

    def append(self, subject: str, data: bytes) -> StoredRecord:
        """Store a record."""
        record = StoredRecord(len(self.records) + 1, subject, data, self._clock())
        self.records.append(record)
        for log in list(self._logs):
            log.wake()
        return record

    def broadcast(self, subject: str, data: bytes) -> None:
        """Pass a heartbeat to all listeners."""
        for log in list(self._logs):
            log.receive_heartbeat(subject, data)

    def join(self, log: "MemoryLog") -> None:
        self._logs.add(log)

    def leave(self, log: "MemoryLog") -> None:
        self._logs.discard(log)

    def last_seq(self, subject: str) -> int:
        held = reversed(self.records[self.forgotten :])
        return next((record.seq for record in held if record.subject == subject), 0)


class MemoryLog:
    """The `shared.log.port.Log` of one simulated process."""

    def __init__(
        self,
        server: MemoryStore,
        *,
        max_posted: int = 65_536,
        on_change: Callable[[bool], None] | None = None,
    ) -> None:
        self.on_change = on_change
        self._server = server
        self._checks = PublishChecks(server.subjects)
        self._max_posted = max_posted
        self._created_ns = server.created_ns
        self._highest = len(server.records)
        self._posts: deque[_Post] = deque()
        self._delivering = False
        self._connected = server.running
        self._changed = asyncio.Event()
        self._listeners: list[tuple[str, deque[tuple[str, bytes]]]] = []
        self._readers: set[_Reader] = set()
        self._publish_ack_s = Histogram.over(SECONDS)
        self._failure: DalSegnoError | None = None
        server.join(self)

    @property
    def connected(self) -> bool:
        return self._connected and self._failure is None

    @property
    def max_payload(self) -> int:
        return self._server.max_payload

    @property
    def is_stalled(self) -> bool:
        return False

    @property
    def durability(self) -> Durability:
        return self._server.durability

    @property
    def is_full(self) -> bool:
        return self._server.is_full

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expected_last_seq: int | None = None,
        waits_while_full: bool = True,
    ) -> int:
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def stored(seq: int) -> None:
            if not outcome.done():
                outcome.set_result(seq)

        def failed(error: DalSegnoError) -> None:
            if not outcome.done():
                outcome.set_exception(error)

        post = _Post(subject, data, expected_last_seq, stored, failed, waits_while_full)
        self._post(post)
        try:
            return await outcome
        finally:
            if post in self._posts:
                self._posts.remove(post)

    def post(self, subject: str, data: bytes, stored: Callable[[int], None] | None = None) -> None:
        self._post(_Post(subject, data, None, stored, None))

    def _post(self, post: _Post) -> None:
        self._checks.check(post.subject, post.data, self.max_payload)
        self._raise_failure()
        if len(self._posts) >= self._max_posted:
            raise OutboxFullError(f"{len(self._posts)} events are posted and not acked: try again later")
        self._posts.append(post)
        self._schedule()

    def _schedule(self) -> None:
        """Deliver on a later turn of the event loop, so that a post returns before its callback runs."""
        if not self._delivering:
            self._delivering = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivering = False
        while self._posts and self.connected and not self._server.stalls:
            if self._server.is_full:
                self._give_back()
                break
            post = self._posts.popleft()
            if post.expected is not None and post.expected != self._server.last_seq(post.subject):
                assert post.failed is not None
                post.failed(
                    WrongLastSequenceError(f"{post.expected} is not the last sequence of {post.subject!r}")
                )
                continue
            seq = self._server.append(post.subject, post.data).seq
            self._highest = max(self._highest, seq)
            self._publish_ack_s.observe(time.monotonic() - post.posted_s)
            if post.stored is not None:
                _call(post.stored, seq)
        self.wake()

    def _give_back(self) -> None:
        """Refuse the events whose publishers do not wait while the log is full."""
        for post in [post for post in self._posts if not post.waits]:
            self._posts.remove(post)
            assert post.failed is not None
            post.failed(LogFullError("the log is full: no new requests are accepted; try again later"))

    async def read(self, subjects: Sequence[str], start_seq: int) -> AsyncGenerator[StoredRecord, None]:
        reader = _Reader(subjects, max(start_seq, 1) - 1)
        self._readers.add(reader)
        try:
            await self._until(lambda: self.connected)
            if reader.position > len(self._server.records):
                raise self._beyond(start_seq)
            while True:
                await self._until(lambda: self.connected)
                for record in self._server.records[max(reader.position, self._server.forgotten) :]:
                    reader.position = record.seq
                    if _matches_any(subjects, record.subject):
                        self._highest = max(self._highest, record.seq)
                        yield record
                        self._raise_failure()
                        if not self.connected:
                            break
                await self._until(partial(self._has_news, reader.position))
        finally:
            self._readers.discard(reader)

    def _has_news(self, position: int) -> bool:
        server = self._server
        return not self.connected or len(server.records) > max(position, server.forgotten)

    async def history(
        self, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        await self._until(lambda: self.connected)
        records = self._server.records
        if start_seq > len(records) + 1:
            raise self._beyond(start_seq)
        for record in records[max(start_seq - 1, self._server.forgotten) : end_seq]:
            if _matches_any(subjects, record.subject):
                yield record

    async def last(self, subject: str) -> StoredRecord | None:
        self._require()
        seq = self._server.last_seq(subject)
        return self._server.records[seq - 1] if seq else None

    async def first_after(self, subject: str, seq: int) -> StoredRecord | None:
        await self._until(lambda: self.connected)
        held = self._server.records[max(seq, self._server.forgotten) :]
        return next((record for record in held if record.subject == subject), None)

    async def state(self) -> LogState:
        self._require()
        records, forgotten = self._server.records, self._server.forgotten
        return LogState(
            first_seq=forgotten + 1,
            last_seq=len(records),
            created_ns=self._server.created_ns,
            messages=len(records) - forgotten,
            first_ns=records[forgotten].time_ns if len(records) > forgotten else 0,
            bytes=self._server.nbytes,
            max_bytes=self._server.max_bytes,
        )

    def stats(self) -> LogStats:
        return LogStats(
            publish_ack_s=self._publish_ack_s,
            unacked=len(self._posts),
            behind=max(map(self._behind, self._readers), default=0),
        )

    def _behind(self, reader: _Reader) -> int:
        news = self._server.records[reader.position :]
        return sum(_matches_any(reader.subjects, record.subject) for record in news)

    async def drain(self) -> None:
        waiting = set(self._posts)
        await self._until(lambda: waiting.isdisjoint(self._posts))

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        if self.connected:
            self._server.broadcast(subject, data)

    async def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        self._raise_failure()
        heartbeats: deque[tuple[str, bytes]] = deque(maxlen=_MAX_HEARTBEATS)
        listener = (subject, heartbeats)
        self._listeners.append(listener)
        try:
            while True:
                await self._until(lambda: bool(heartbeats))
                yield heartbeats.popleft()
        finally:
            self._listeners.remove(listener)

    async def close(self) -> None:
        self._fail(LogUnavailableError("the log is closed"))
        self._server.leave(self)

    # ---- called by the store ------------------------------------------------------------------------
    def wake(self) -> None:
        self._changed.set()

    def receive_heartbeat(self, subject: str, data: bytes) -> None:
        if not self.connected:
            return
        for pattern, heartbeats in self._listeners:
            if matches(pattern, subject):
                heartbeats.append((subject, data))
        self.wake()

    def server_changed(self) -> None:
        server = self._server
        if server.running and server.created_ns != self._created_ns:
            self._fail(LogRegressedError("the log was recreated: its earlier events are gone"))
        elif server.running and len(server.records) < self._highest:
            self._fail(
                LogRegressedError(f"the log ends at {len(server.records)}, but had reached {self._highest}")
            )
        if self._connected != server.running:
            self._connected = server.running
            if self._failure is None:
                self._notify(connected=self._connected)
        if self._posts:
            self._schedule()
        self.wake()

    def _fail(self, failure: DalSegnoError) -> None:
        if self._failure is not None:
            return
        was_connected, self._failure = self.connected, failure
        posts = list(self._posts)
        self._posts.clear()
        for post in posts:
            if post.failed is not None:
                post.failed(failure)
        self.wake()
        if was_connected:
            self._notify(connected=False)

    def _notify(self, *, connected: bool) -> None:
        if self.on_change is not None:
            _call(self.on_change, connected)

    def _require(self) -> None:
        self._raise_failure()
        if not self.connected:
            raise LogUnavailableError("the log does not answer")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _beyond(self, start_seq: int) -> LogRegressedError:
        return LogRegressedError(
            f"cannot read from {start_seq} on: the log ends at {len(self._server.records)}"
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._raise_failure()
            if condition():
                return
            changed = self._changed
            await changed.wait()
            if changed is self._changed:  # the first to wake makes the next event for all
                self._changed = asyncio.Event()


def _call(callback: Callable[[Any], None], argument: object) -> None:
    try:
        callback(argument)
    except Exception as error:  # noqa: BLE001 - a bug in one callback must not stop the others
        context = {"message": "a callback failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


def matches(pattern: str, subject: str) -> bool:
    """Return whether a NATS subject matches a pattern: `*` is one token, a last `>` one or more."""
    wanted, found = pattern.split("."), subject.split(".")
    for position, want in enumerate(wanted):
        if want == ">":
            return len(found) > position
        if position >= len(found) or want not in ("*", found[position]):
            return False
    return len(found) == len(wanted)


def _matches_any(patterns: Sequence[str], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)
