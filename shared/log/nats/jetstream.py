"""The log on NATS JetStream: `connect` to it, `provision` its stream.

A log has a connection (`shared.log.nats.connection`), an outbox that tracks events to their acks
(`shared.log.nats.outbox`) and, for each reader, a cursor (`shared.log.nats.cursor`) with a server-side
consumer (`shared.log.nats.consumer`). It verifies after each reconnect that the log is still the same log.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from shared.errors import DalSegnoError
from shared.log.nats import api, missing_records, polling, provisioning
from shared.log.nats.connection import NatsConnection
from shared.log.nats.consumer import Consumer, NoConsumerLeftError
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.nats.cursor import Cursor
from shared.log.nats.durability import StreamPolicy, check_stream
from shared.log.nats.outbox import FULL_MESSAGE, Outbox, OutboxEntry, PublishRefused
from shared.log.nats.store_files import StoreFiles
from shared.log.port import (
    Durability,
    DurabilityError,
    LogFullError,
    LogRegressedError,
    LogState,
    LogStats,
    LogUnavailableError,
    MissingRecords,
    StoredRecord,
    WrongLastSequenceError,
)
from shared.log.publish_checks import PublishChecks
from shared.subjects import Subjects
from shared.telemetry import timeline

_LOGGER: Final = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")
ROLE_PATIENCE_S: Final = 30.0
"""The time limit of `connect` when a role starts: the launcher creates the stream meanwhile."""
_RETRY_QUERY_S: Final = 5.0
"""The time for which a query (`state`, `last`) is retried while the server restarts."""
_RETRY_S: Final = 0.05
_RETRY_AT_MOST_S: Final = 0.5
_STATE_TIMEOUT_S: Final = 1.0
"""Shorter than for other queries: a cluster without a leader does not answer."""
_MARGIN_BYTES: Final = 4096
"""Events stay this much below `max_payload`, because headers count as well."""
_MAX_HEARTBEATS: Final = 1024
_DEPOSED_FOR_S: Final = 12.0
"""A server that is cut off from its cluster acts as leader for up to 10 s."""
_NO_RESPONDERS: Final = 503
_DECODE_ACK: Final = msgspec.json.Decoder(api.PubAck).decode


async def connect(
    url: str,
    *,
    credentials: Credentials = ANONYMOUS,
    subjects: Subjects,
    name: str,
    durability: Durability = "process",
    timeout_s: float = 0.0,
    on_change: Callable[[bool], None] | None = None,
    max_pending: int = 1 << 18,
) -> "JetStreamLog":
    """Connect to the log of one deployment.

    Args:
        url: the servers.
        credentials: shown to the server. Wrong credentials are an error at once.
        subjects: the deployment's subjects.
        name: the label of the connection on the server.
        durability: the required durability.
        timeout_s: the time for which to retry if there is no server, no JetStream or no stream yet.
        on_change: see `shared.log.port.Log`.
        max_pending: the maximum number of records queued for one reader.

    Raises:
        LogUnavailableError: the server, JetStream or the stream is missing.
        DurabilityError: the log provides less than `durability`.
    """
    log = JetStreamLog(
        url, subjects, name, durability=durability, max_pending=max_pending, on_change=on_change
    )
    await log._open(credentials=credentials, name=name, timeout_s=timeout_s)  # noqa: SLF001 - same module
    return log


async def provision(
    url: str,
    credentials: Credentials,
    subjects: Subjects,
    policy: StreamPolicy | None = None,
    *,
    timeout_s: float = 0.0,
) -> None:
    """Create or update the stream of a deployment. Several processes may do so concurrently.

    Raises:
        LogUnavailableError: the server cannot be reached, has no JetStream, or refuses the stream.
        DurabilityError: the server does not provide the required durability.
    """
    policy = policy or StreamPolicy()
    connection = NatsConnection(url)
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        await connection.open(credentials=credentials, name="dalsegno-provision", timeout_s=timeout_s)
        await _until(deadline, lambda: provisioning.provide(connection, subjects, policy))
    finally:
        await connection.close()


class JetStreamLog:
    """The `shared.log.port.Log` of one deployment; made by `connect`."""

    def __init__(
        self,
        url: str,
        subjects: Subjects,
        name: str,
        *,
        durability: Durability,
        max_pending: int,
        on_change: Callable[[bool], None] | None,
    ) -> None:
        self.on_change = on_change
        self._role = name.partition(" ")[0]
        self._is_polling = False
        self._checks = PublishChecks(subjects)
        self._prefix = subjects.prefix
        self._stream = subjects.stream
        self._max_pending = max_pending
        self._connection = NatsConnection(
            url, connected=self._connected, disconnected=self._disconnected, denied=self._fail
        )
        self._outbox = Outbox(self._transmit)
        self._ack_prefix = ""
        self._online = asyncio.Event()
        self._cursors: set[Cursor] = set()
        self._listeners: set[_Listener] = set()
        self._created_ns = 0
        self._highest = 0  # the highest position of the log that this process has seen
        self._last_read = (0, b"")  # the highest record that was read here, and its time of storage
        self._last_written = (0, b"")  # the highest event that was written here
        self._behind_since_s: float | None = None
        self._required_durability = durability
        self._durability: Durability = "process"
        self._failure: DalSegnoError | None = None
        self._missing: tuple[MissingRecords, ...] = ()

    # ---- connection -----------------------------------------------------------------------------------
    @property
    def connected(self) -> bool:
        return self._failure is None and self._online.is_set() and bool(self._connection.is_connected)

    @property
    def max_payload(self) -> int:
        return int(self._connection.max_payload) - _MARGIN_BYTES

    @property
    def is_full(self) -> bool:
        return self._outbox.refusal in api.FULL

    @property
    def is_stalled(self) -> bool:
        return self._outbox.is_stalled

    @property
    def durability(self) -> Durability:
        return self._durability

    async def _open(self, *, credentials: Credentials, name: str, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            await self._connection.open(credentials=credentials, name=name, timeout_s=timeout_s)
            state = (await _until(deadline, self._verified_info)).log_state()
            self._created_ns = state.created_ns
            self._highest = state.last_seq
            inbox = self._connection.new_inbox()
            self._ack_prefix = f"{inbox}."
            self._connection.attach(f"{inbox}.*", self._on_ack)
        except BaseException:
            await self._connection.close()
            raise
        self._go_online()

    async def _verified_info(self) -> api.StreamInfo:
        info = await self._info()
        self._durability = check_stream(self._required_durability, info, self._connection.label)
        return info

    async def _connected(self) -> None:
        """After a reconnect, verify that it is still the same log before writing and reading resume."""
        pause = _Pause()
        while True:
            try:
                info = await self._same_log()
                self._durability = check_stream(self._required_durability, info, self._connection.label)
            except (LogUnavailableError, DurabilityError) as error:
                _LOGGER.warning("waiting for the log: %s", error)
                await pause.wait()
            except LogRegressedError:
                return  # `_same_log` has reported it to all readers and publishers
            else:
                self._go_online()
                self._notify(connected=True)
                return

    def _go_online(self) -> None:
        self._online.set()
        self._outbox.online()
        for cursor in self._cursors:
            cursor.fail("the connection is new")

    async def _disconnected(self) -> None:
        self._outbox.offline()
        if self._online.is_set() and self._failure is None:
            self._online.clear()
            self._notify(connected=False)

    def _notify(self, *, connected: bool) -> None:
        if self.on_change is None:
            return
        try:
            self.on_change(connected)
        except Exception as error:  # noqa: BLE001 - a bug in the callback must not stop the reconnect
            context = {"message": "an on_change callback failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _fail(self, failure: DalSegnoError) -> None:
        if self._failure is not None:
            return
        was_connected, self._failure = self.connected, failure
        self._outbox.fail(failure)
        for cursor in self._cursors:
            cursor.fail(failure.message)
        for listener in self._listeners:
            listener.wake()
        self._online.set()  # ends all waits for the log
        if was_connected:
            self._notify(connected=False)

    async def _same_log(self) -> api.StreamInfo:
        """Return the log's info after a check that the log lost no events; if it did, fail all users."""
        for cursor in self._cursors:
            self._note_position(cursor)
        highest = self._highest  # read *before* the query: events may be stored after the reply
        info = await self._info()
        state = info.log_state()
        if state.created_ns != self._created_ns:
            what = "was recreated since this process connected: its earlier events are gone"
        elif state.last_seq < highest:
            what = f"ends at {state.last_seq}, had reached {highest}: it lost events or is a restored copy"
            self._wait_for_leader(state, what)
        elif (seq := await self._differs_at()) is not None:
            what = f"has another event at {seq} than before: it is a restored copy"
        else:
            self._behind_since_s = None
            return info
        failure = LogRegressedError(
            f"the stream {self._stream!r} at {self._connection.label} {what}; every role has to restart: "
            "restart those without a supervisor"
        )
        self._fail(failure)
        raise failure

    def _note_position(self, cursor: Cursor) -> None:
        self._highest = max(self._highest, cursor.reached)
        self._last_read = max(self._last_read, (cursor.reached, cursor.reached_ns))

    async def _differs_at(self) -> int | None:
        """Return a position at which the log has another event than this process read or wrote there.

        None if there is none, also if the log has deleted those positions.
        """
        (read_seq, time_ns), (own_seq, data) = self._last_read, self._last_written
        read = await self._message({"seq": read_seq}) if read_seq else None
        if read is not None and read.time_ns != int(time_ns):
            return read_seq
        own = await self._message({"seq": own_seq}) if own_seq else None
        return own_seq if own is not None and own.data != data else None

    def _wait_for_leader(self, state: LogState, what: str) -> None:
        """Allow for a former leader that is cut off and answers until it learns of its successor.

        Raises:
            LogUnavailableError: a former leader may be the reason for the missing events.
        """
        if state.replicas == 1:
            return
        now = asyncio.get_running_loop().time()
        self._behind_since_s = self._behind_since_s or now
        if now - self._behind_since_s < _DEPOSED_FOR_S:
            raise LogUnavailableError(f"the stream {self._stream!r} at {self._connection.label} {what}")

    def _check_start(self, start_seq: int, state: LogState) -> None:
        if start_seq > state.last_seq + 1:
            raise LogRegressedError(
                f"cannot read the stream {self._stream!r} from {start_seq} on: it ends at {state.last_seq}; "
                "the saved position (of a snapshot?) belongs to another log"
            )

    async def close(self) -> None:
        self._fail(LogUnavailableError("the log is closed"))
        await self._connection.close()

    # ---- writing --------------------------------------------------------------------------------------
    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expected_last_seq: int | None = None,
        waits_while_full: bool = True,
    ) -> int:
        self._checks.check(subject, data, self.max_payload)
        resent = False
        pause = _Pause()
        while True:
            try:
                return await self._publish_once(subject, data, expected_last_seq, waits=waits_while_full)
            except PublishRefused as refused:
                if refused.code in api.FULL:
                    raise LogFullError(FULL_MESSAGE) from None
                in_flight = refused.code == api.WRONG_LAST_SEQUENCE_IN_FLIGHT
                resent = resent or refused.sent > 1
            assert expected_last_seq is not None
            if resent or in_flight:
                # An earlier copy may have been stored, which is why this one was refused, and others may have
                # written since. The record right after the expected sequence number decides.
                successor = await self.first_after(subject, expected_last_seq)
                if successor is not None and successor.data == data:
                    return successor.seq
                if successor is None and in_flight:  # another publish was in flight, and was not stored
                    resent = True
                    await pause.wait()
                    continue
            raise WrongLastSequenceError(
                f"expected {expected_last_seq} as the last sequence of {subject!r}, found another"
            )

    async def _publish_once(
        self, subject: str, data: bytes, expected_last_seq: int | None, *, waits: bool
    ) -> int:
        """Wait for the ack. An unmet expectation raises `PublishRefused`."""
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number = self._outbox.post(
            subject, data, _setter(stored), _exception_setter(stored), expected_last_seq, waits
        )
        try:
            return await stored
        finally:
            self._outbox.discard(number)

    def post(self, subject: str, data: bytes, stored: Callable[[int], None] | None = None) -> None:
        self._checks.check(subject, data, self.max_payload)
        self._outbox.post(subject, data, stored)

    def stats(self) -> LogStats:
        return LogStats(
            publish_ack_s=self._outbox.publish_ack_s,
            unacked=len(self._outbox),
            behind=max((cursor.behind for cursor in self._cursors if cursor.end_seq is None), default=0),
        )

    async def drain(self) -> None:
        await self._outbox.drain()

    def _transmit(self, number: int, entry: OutboxEntry) -> None:
        self._connection.send_publish(
            entry.subject, f"{self._ack_prefix}{number}", entry.data, entry.expected
        )

    def _on_ack(self, subject: bytes, _reply: bytes, data: bytes, header: bytes | None) -> None:
        number = int(subject[len(self._ack_prefix) :])
        if header is not None and not data:
            self._outbox.refused(number, _NO_RESPONDERS, f"the stream {self._stream} does not exist")
            return
        ack = _DECODE_ACK(data)
        if ack.error is not None:
            self._outbox.refused(number, ack.error.err_code, ack.error.description)
            return
        self._highest = max(self._highest, ack.seq)
        written = self._outbox.acked(number, ack.seq)
        if written is not None and ack.seq > self._last_written[0]:
            self._last_written = (ack.seq, written)

    # ---- reading --------------------------------------------------------------------------------------
    def read(self, subjects: Sequence[str], start_seq: int) -> AsyncGenerator[StoredRecord, None]:
        return self._records(subjects, self._cursor(start_seq, None))

    async def history(
        self, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        state = await self.state()
        last_seq = state.last_seq
        self._check_start(start_seq, state)
        end_seq = last_seq if end_seq is None else min(end_seq, last_seq)
        cursor = self._cursor(start_seq, end_seq, is_replicated=state.replicas > 1)
        async with contextlib.aclosing(self._records(subjects, cursor)) as records:
            async for record in records:
                yield record

    def _cursor(self, start_seq: int, end_seq: int | None, *, is_replicated: bool = False) -> Cursor:
        return Cursor(
            max(start_seq, 1),
            end_seq,
            self._connection.send_empty,
            max_pending=self._max_pending,
            max_pending_bytes=64 * 1024 * 1024,
            is_replicated=is_replicated,
        )

    async def _records(self, subjects: Sequence[str], cursor: Cursor) -> AsyncGenerator[StoredRecord, None]:
        consumer = Consumer(self._connection, self._stream, self._role, list(subjects), cursor)
        self._cursors.add(cursor)
        recording = timeline.recording()
        try:
            while True:
                while (record := cursor.take()) is not None:
                    if recording is not None:
                        recording.delivered(record.subject, record.seq, record.time_ns)
                    yield record
                if cursor.finished:
                    return
                if cursor.fault is not None:
                    await self._reattach(consumer, cursor)
                if cursor.seems_finished:
                    await self._verify_end(subjects, cursor)
                await cursor.wait()
        finally:
            consumer.detach()
            self._cursors.discard(cursor)
            self._note_position(cursor)

    async def _verify_end(self, subjects: Sequence[str], cursor: Cursor) -> None:
        """Ask the stream's leader whether a reader has all records; if not, the rest is delivered later."""
        assert cursor.end_seq is not None
        position, is_all = cursor.position, True
        try:
            for subject in subjects:
                record = await self._next_on(subject, position)
                is_all = is_all and (record is None or record.seq > cursor.end_seq)
        except LogUnavailableError as error:
            _LOGGER.debug("the end of %s is not known yet: %s", self._stream, error)
            await asyncio.sleep(_RETRY_S)  # `seems_finished` stays set, so the caller tries again
            return
        if cursor.position == position:  # else more records arrived meanwhile
            cursor.seems_finished, cursor.finished = False, is_all

    async def _reattach(self, consumer: Consumer, cursor: Cursor) -> None:
        """Attach a new consumer at the cursor's position; retried until it works."""
        pause = _Pause()
        while True:
            consumer.detach()
            await self._online.wait()
            self._raise_failure()
            _LOGGER.debug("reading %s from %d on: %s", self._stream, cursor.position + 1, cursor.fault)
            try:
                state = (await self._same_log()).log_state()
                self._check_start(cursor.position + 1, state)
                await consumer.attach(state.last_seq)
                self._note_consumer_shortage(None)
                return
            except NoConsumerLeftError as error:
                self._note_consumer_shortage(error)
                consumer.poll(polling.Source(self._record_at, self._next_on, self._state))
                return
            except LogUnavailableError as error:
                _LOGGER.warning("reading %s waits: %s", self._stream, error)
            await pause.wait()

    def _note_consumer_shortage(self, error: NoConsumerLeftError | None) -> None:
        """Log once that readers have to poll, and once that they have consumers again."""
        if error is not None and not self._is_polling:
            _LOGGER.warning(
                "%s: this process reads by single requests until a consumer is free; end readers that are "
                "not needed, or raise nats.max_consumers",
                error,
            )
        elif error is None and self._is_polling:
            _LOGGER.info("the stream %r has free consumers again", self._stream)
        self._is_polling = error is not None

    async def _record_at(self, seq: int) -> StoredRecord | None:
        return await self._message({"seq": seq})

    async def last(self, subject: str) -> StoredRecord | None:
        return await self._retried(lambda: self._message({"last_by_subj": subject}))

    async def first_after(self, subject: str, seq: int) -> StoredRecord | None:
        while True:
            with contextlib.suppress(LogUnavailableError):
                return await self._next_on(subject, seq)
            await self._online.wait()
            self._raise_failure()
            await asyncio.sleep(_RETRY_S)

    async def _next_on(self, subject: str, seq: int) -> StoredRecord | None:
        """Return the first record after `seq` on a subject, which may have wildcards."""
        return await self._message({"seq": seq + 1, "next_by_subj": subject})

    async def state(self) -> LogState:
        return await self._retried(self._state)

    async def _retried(self, query: Callable[[], Awaitable[_Reply]]) -> _Reply:
        self._raise_failure()
        return await _until(asyncio.get_running_loop().time() + _RETRY_QUERY_S, query)

    async def _state(self) -> LogState:
        return replace((await self._info()).log_state(), missing=self._missing)

    async def find_missing(self, files: StoreFiles) -> tuple[MissingRecords, ...]:
        """Read the whole log, and find records that were lost; `state` returns them from now on.

        Args:
            files: the log's files before its server was started.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        state = await self.state()
        async with contextlib.aclosing(self.history([f"{self._prefix}.>"], state.first_seq)) as records:
            found = await missing_records.gaps(records, state)
        if not state.messages and not files.has_records and state.last_seq:
            found.append((1, state.last_seq))
        ranges = missing_records.joined(found, (await self._info()).lost)
        self._missing = tuple(MissingRecords(*one, files.blame(*one)) for one in ranges)
        return self._missing

    async def _info(self) -> api.StreamInfo:
        subject = f"$JS.API.STREAM.INFO.{self._stream}"
        info = await self._connection.call_api(subject, b"", api.StreamInfo, timeout_s=_STATE_TIMEOUT_S)
        if info.error is None:
            return info
        if info.error.err_code == api.STREAM_NOT_FOUND:
            raise LogUnavailableError(
                f"{self._connection.label} has no stream {self._stream!r}: "
                f"run `dalsegno provision --nats {self._connection.address} --prefix {self._prefix}`"
            )
        raise LogUnavailableError(
            f"{self._connection.label} reports an error about {self._stream!r}: {info.error.description} "
            f"(code {info.error.err_code})"
        )

    async def _message(self, query: dict[str, int | str]) -> StoredRecord | None:
        subject = f"$JS.API.STREAM.MSG.GET.{self._stream}"
        reply = await self._connection.call_api(subject, msgspec.json.encode(query), api.MessageReply)
        if reply.error is None:
            return reply.record()
        if reply.error.err_code == api.NO_MESSAGE:
            return None
        raise LogUnavailableError(
            f"{self._connection.label} cannot look up {query} in {self._stream!r}: {reply.error.description}"
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- heartbeats -----------------------------------------------------------------------------------
    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        self._connection.send_publish(subject, "", data, None)

    async def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        listener = _Listener()
        self._raise_failure()
        sid = self._connection.attach(subject, listener.receive)
        self._listeners.add(listener)
        try:
            while True:
                while listener.heartbeats:
                    yield listener.heartbeats.popleft()
                self._raise_failure()
                await listener.wait()
        finally:
            self._listeners.discard(listener)
            self._connection.detach(sid)


class _Pause:
    """The pause between two retries; it doubles each time, up to a limit."""

    def __init__(self) -> None:
        self.next_s = _RETRY_S

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, _RETRY_AT_MOST_S)


class _Listener:
    """The heartbeats that a listener has not read yet; if there are too many, the oldest are dropped."""

    def __init__(self) -> None:
        self.heartbeats: deque[tuple[str, bytes]] = deque(maxlen=_MAX_HEARTBEATS)
        self._change = asyncio.Event()

    def receive(self, subject: bytes, _reply: bytes, data: bytes, _header: bytes | None) -> None:
        self.heartbeats.append((subject.decode(errors="replace"), data))
        self._change.set()

    def wake(self) -> None:
        self._change.set()

    async def wait(self) -> None:
        await self._change.wait()
        self._change.clear()


async def _until(deadline: float, query: Callable[[], Awaitable[_Reply]]) -> _Reply:
    """Retry a query until it succeeds, or until the deadline; then raise the last error."""
    loop = asyncio.get_running_loop()
    pause = _Pause()
    while True:
        try:
            return await query()
        except (LogUnavailableError, DurabilityError):  # provisioning may still be in progress
            if loop.time() + pause.next_s > deadline:
                raise
        await pause.wait()


def _setter(future: asyncio.Future[int]) -> Callable[[int], None]:
    def set_result(seq: int) -> None:
        if not future.done():
            future.set_result(seq)

    return set_result


def _exception_setter(future: asyncio.Future[int]) -> Callable[[Exception], None]:
    def set_exception(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    return set_exception
