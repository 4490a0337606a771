"""The JetStream consumer that feeds a cursor, and its watchdog.

A stream has a limited number of consumers, and other keys may use them up. Then `attach` fails by name, and
the cursor is fed by `shared.log.nats.polling` for a while.

A consumer is short-lived: when its cursor reports a fault, the reader detaches it and attaches a new one,
which delivers from the cursor's position on (`shared.log.nats.cursor`).
"""

import asyncio
from typing import Final

from shared.errors import DalSegnoError
from shared.log.nats import api, polling
from shared.log.nats.connection import NatsConnection
from shared.log.nats.cursor import Cursor
from shared.log.nats.subject_filter import covering_filter, matcher, wide_filter_pays
from shared.log.port import LogUnavailableError

_TICK_S: Final = 1.0


class NoConsumerLeftError(LogUnavailableError):
    """The stream has as many consumers as it may have."""


class Consumer:
    """The current consumer of one reader."""

    def __init__(
        self, connection: NatsConnection, stream: str, role: str, subjects: list[str], cursor: Cursor
    ) -> None:
        self._connection = connection
        self._role = role
        self._stream = stream
        self._subjects = subjects
        self._cursor = cursor
        self._sid: int | None = None
        self._name = ""
        self._timer: asyncio.TimerHandle | None = None
        self._polling: asyncio.Task[None] | None = None

    def poll(self, source: polling.Source) -> None:
        """Feed the cursor without a consumer for a while (`shared.log.nats.polling`)."""
        self._cursor.attaching()
        self._polling = asyncio.get_running_loop().create_task(self._poll(source), name="poll the log")

    async def _poll(self, source: polling.Source) -> None:
        try:
            await polling.poll(self._cursor, self._subjects, source)
        except DalSegnoError as error:
            self._cursor.fail(error.message)

    async def attach(self, last_seq: int) -> None:
        """Create a consumer from the cursor's position on; the log now ends at `last_seq`."""
        self._cursor.attaching()
        pending = await self._make(self._subjects)
        if wide_filter_pays(self._subjects, last_seq - self._cursor.position, pending):
            self.detach()
            self._cursor.attaching(matcher(self._subjects), last_seq)
            pending = await self._make([covering_filter(self._subjects)])
        self._cursor.attached(pending)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    async def _make(self, subjects: list[str]) -> int:
        """Create a consumer of these subjects; return its number of pending records."""
        inbox = self._connection.new_inbox()
        # The name is ours, so that the consumer can be deleted even if the server's reply is lost.
        self._name = f"{self._role}-{inbox.rpartition('.')[2]}"
        self._sid = self._connection.attach(inbox, self._delivered)
        request = api.consumer_request(self._stream, self._name, inbox, subjects, self._cursor.position + 1)
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}"
        try:
            info = await self._connection.call_api(subject, request, api.ConsumerInfo)
            if info.error is not None:
                kind = (
                    NoConsumerLeftError if info.error.err_code == api.MAX_CONSUMERS else LogUnavailableError
                )
                raise kind(
                    f"{self._connection.label} created no consumer of {subjects}: {info.error.description} "
                    f"(code {info.error.err_code})"
                )
        except BaseException:
            self._cursor.fail("no consumer yet")
            raise
        return info.num_pending

    def detach(self) -> None:
        """Delete the consumer, without waiting for the server's reply, or end the polling."""
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sid is None:
            return
        self._connection.detach(self._sid)
        self._connection.send_empty(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}")
        self._sid = None

    def _delivered(self, subject: bytes, reply: bytes, data: bytes, header: bytes | None) -> None:
        # The reply subject is checked first: a record's header is its publisher's and may contain anything.
        if reply.startswith(b"$JS.ACK."):
            self._cursor.deliver(subject, reply, data)
        elif header is not None and header.startswith(b"NATS/1.0 1"):
            self._cursor.control(reply, header)
        else:
            self._cursor.fail(f"an unexpected message: {header!r}")

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._cursor.tick()
