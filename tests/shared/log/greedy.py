"""A client that opens as many readers of the log as it can, and opens them again when they are ended."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import nats
from nats.aio.client import Client

from shared.log.nats.api import MAX_CONSUMERS
from shared.log.nats.credentials import Credentials

_BURST: Final = 64
"""Requests that are sent before their replies are read."""


@dataclass(slots=True)
class GreedyReaders:
    """The readers of one key. `opened` counts those that the server granted, `refused` those it did not.

    `is_full` is set when the stream has refused a reader for the first time.
    """

    client: Client
    stream: str
    inbox: str
    opened: int = 0
    refused: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def fight(self) -> None:
        """Open readers, each with a subscriber, until cancelled."""
        while True:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_BURST):
                    tasks.create_task(self._open())

    async def _open(self) -> None:
        name = f"greedy-{self.inbox}-{next(self._numbers)}"
        inbox = f"{self.inbox}.{name}"
        reading = await self.client.subscribe(inbox)
        config: dict[str, Any] = {"name": name, "deliver_subject": inbox, "ack_policy": "none"}
        config |= {"deliver_policy": "new", "mem_storage": True, "inactive_threshold": 250 * 10**9}
        request = json.dumps({"stream_name": self.stream, "config": config}).encode()
        error = None
        with contextlib.suppress(nats.errors.TimeoutError):
            subject = f"$JS.API.CONSUMER.CREATE.{self.stream}.{name}"
            reply = await self.client.request(subject, request, timeout=5)
            error = json.loads(reply.data).get("error")
        if error is None:
            self.opened += 1
            return
        assert error["err_code"] == MAX_CONSUMERS, error
        self.refused += 1
        self.is_full.set()
        await reading.unsubscribe()


@asynccontextmanager
async def greedy_readers(url: str, credentials: Credentials, stream: str) -> AsyncIterator[GreedyReaders]:
    """Readers that fight for the whole block, with the credentials of a user and password."""
    client = await nats.connect(
        url,
        token=credentials.token,
        user=credentials.user,
        password=credentials.password,
        inbox_prefix=credentials.inbox_prefix,
        allow_reconnect=False,
    )
    readers = GreedyReaders(client, stream, credentials.inbox_prefix)
    fight = asyncio.create_task(readers.fight())
    try:
        yield readers
    finally:
        fight.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fight
        await client.close()
