"""A NATS connection with a role's key: the stock client, which records what was stored or denied."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.client import Client

from shared.log.nats.credentials import Credentials

_SETTLE_S = 10.0
logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())
"""nats-py keeps a TLS connection half open, which asyncio warns of at each close."""


class Bus(Client):  # type: ignore[misc]  # nats-py's types are not read
    """A connection of one role."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self._denied: list[str] = []

    async def open(self, url: str, credentials: Credentials, ca_file: str | None) -> None:
        self._public_nkey = credentials.public_key
        await self.connect(
            url,
            user=credentials.user,
            password=credentials.password,
            signature_cb=credentials.sign if credentials.seed is not None else None,
            inbox_prefix=credentials.inbox_prefix,
            tls=ssl.create_default_context(cafile=ca_file) if ca_file else None,
            error_cb=self._note,
            allow_reconnect=False,
        )

    async def _note(self, error: Exception) -> None:
        self._denied.append(str(error).lower())

    async def tell(self, messages: Sequence[tuple[str, bytes]]) -> list[int | None]:
        """Publish all; return the position at which each was stored, or None if it was not."""
        inbox = self.new_inbox()
        stored: list[int | None] = [None] * len(messages)
        answered = 0

        async def take(message: Any) -> None:
            nonlocal answered
            answered += 1
            stored[int(message.subject.rpartition(".")[2])] = json.loads(message.data).get("seq")

        subscription = await self.subscribe(f"{inbox}.*", cb=take)
        self._denied.clear()
        for place, (subject, data) in enumerate(messages):
            await self.publish(subject, data, reply=f"{inbox}.{place}")
        async with asyncio.timeout(_SETTLE_S):
            while answered + len(self._denied) < len(messages):
                await self.flush()
                await asyncio.sleep(0.005)
        await subscription.unsubscribe()
        return stored

    async def whisper(self, subject: str, data: bytes) -> bool:
        """Publish what the log does not store; return True if the server allowed it."""
        self._denied.clear()
        await self.publish(subject, data)
        await self.flush()
        await asyncio.sleep(0.05)
        await self.flush()
        return not self._denied


@asynccontextmanager
async def connected(
    url: str, role: str, credentials: Credentials, ca_file: str | None = None
) -> AsyncIterator[Bus]:
    bus = Bus(role)
    await bus.open(url, credentials, ca_file)
    try:
        yield bus
    finally:
        await bus.close()
