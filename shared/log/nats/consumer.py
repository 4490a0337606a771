"""The consumer on the server that feeds a cursor now, and its watchdog.

Short-lived: whenever its cursor no longer trusts it, its reader lets go of it and attaches a new one, which
delivers from the cursor's position on (`shared.log.nats.cursor`).
"""

import asyncio
from typing import Final

from shared.log.nats import api
from shared.log.nats.connection import NatsConnection
from shared.log.nats.cursor import Cursor
from shared.log.nats.subject_filter import cover, pays, sieve
from shared.log.port import LogUnavailableError

_TICK_S: Final = 1.0


class Consumer:
    """One reader's consumer: one at a time, as many as it takes."""

    def __init__(self, connection: NatsConnection, stream: str, subjects: list[str], cursor: Cursor) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = subjects
        self._cursor = cursor
        self._sid: int | None = None
        self._name = ""
        self._timer: asyncio.TimerHandle | None = None

    async def attach(self, last_seq: int) -> None:
        """Make a consumer that delivers from the cursor's position on; the log ends at `last_seq` now."""
        self._cursor.attaching()
        pending = await self._make(self._subjects)
        if pays(self._subjects, last_seq - self._cursor.position, pending):
            self.detach()
            self._cursor.attaching(sieve(self._subjects), last_seq)
            pending = await self._make([cover(self._subjects)])
        self._cursor.attached(pending)
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    async def _make(self, subjects: list[str]) -> int:
        """Make a consumer of these; how many records it has to deliver now."""
        inbox = self._connection.new_inbox()
        # The consumer is named by us, so that it can be deleted even if the answer to this gets lost.
        self._name = inbox.rpartition(".")[2]
        self._sid = self._connection.attach(inbox, self._delivered)
        request = api.consumer_request(self._stream, self._name, inbox, subjects, self._cursor.position + 1)
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}"
        try:
            info = await self._connection.call_api(subject, request, api.ConsumerInfo)
            if info.error is not None:
                raise LogUnavailableError(
                    f"{self._connection.label} made no reader of {subjects}: {info.error.description} "
                    f"(code {info.error.err_code})"
                )
        except BaseException:
            self._cursor.fail("no consumer yet")
            raise
        return info.num_pending

    def detach(self) -> None:
        """Let go of the consumer; nobody waits for the server's answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sid is None:
            return
        self._connection.detach(self._sid)
        self._connection.send_empty(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}")
        self._sid = None

    def _delivered(self, subject: bytes, reply: bytes, data: bytes, header: bytes | None) -> None:
        # By the reply first: the header of a record is its publisher's, who may have written anything in it.
        if reply.startswith(b"$JS.ACK."):
            self._cursor.deliver(subject, reply, data)
        elif header is not None and header.startswith(b"NATS/1.0 1"):
            self._cursor.control(reply, header)
        else:
            self._cursor.fail(f"an unexpected message: {header!r}")

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._cursor.tick()
