"""A proxy to a server that delays every byte in both directions, without loss and in order."""

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit


class Delay:
    """Listens on a port and forwards all data after `seconds`."""

    def __init__(self, url: str, *, seconds: float) -> None:
        self.url = ""
        parts = urlsplit(url)
        self._there = (parts.hostname, parts.port)
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self._count = 0
        self._ended = asyncio.Semaphore(0)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for _ in range(self._count):
            await self._ended.acquire()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        answers, there = await asyncio.open_connection(*self._there)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(reader, there))
            tasks.create_task(self._pass_on(answers, writer))
        for end in (there, writer):
            with contextlib.suppress(OSError):
                await end.wait_closed()
        self._ended.release()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                loop.call_later(self._seconds, target.write, data)
        await asyncio.sleep(self._seconds)  # after the last byte
        target.close()
