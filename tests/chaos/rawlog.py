"""The raw stream: bytes, read with the stock client and none of our code."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import nats
import nats.aio.client
import nats.js.api

_READ_S: Final = 30.0
STREAM: Final = "DS_LOG"


@dataclass(frozen=True, slots=True)
class Record:
    """A message of the stream; `time_s` is its storage time by the server's clock."""

    seq: int
    subject: str
    data: bytes
    time_s: float = 0.0


@asynccontextmanager
async def connected(url: str, token: str) -> AsyncGenerator["RawLog", None]:
    """Connect to the servers directly, past all proxies."""
    client = await nats.connect(
        url.split(","), token=token, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_quietly
    )
    try:
        yield RawLog(client)
    finally:
        await client.close()


async def _quietly(_: Exception) -> None:
    """Ignore errors: these tests take servers away."""


class RawLog:
    """Reads the stream, and receives heartbeats."""

    def __init__(self, client: nats.aio.client.Client) -> None:
        self._client = client
        self._stream = client.jetstream(timeout=5.0)

    async def last_seq(self) -> int:
        info = await self._stream.stream_info(STREAM)
        return int(info.state.last_seq)

    async def records(self, start_seq: int) -> list[Record]:
        """All records from `start_seq` up to the current end."""
        last_seq = await self.last_seq()
        if last_seq < start_seq:
            return []
        config = nats.js.api.ConsumerConfig(
            deliver_policy=nats.js.api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start_seq
        )
        subscription = await self._stream.subscribe(">", stream=STREAM, ordered_consumer=True, config=config)
        found: list[Record] = []
        try:
            async with asyncio.timeout(_READ_S):
                while not found or found[-1].seq < last_seq:
                    message = await subscription.next_msg(timeout=_READ_S)
                    about = message.metadata
                    found.append(
                        Record(
                            about.sequence.stream, message.subject, message.data, about.timestamp.timestamp()
                        )
                    )
        finally:
            await subscription.unsubscribe()
        return found

    async def beats(self, subject: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """The heartbeats of all processes, from now on."""
        subscription = await self._client.subscribe(subject)
        try:
            async for message in subscription.messages:
                yield message.subject, msgspec.msgpack.decode(message.data)
        finally:
            await subscription.unsubscribe()
