"""A TCP proxy before a gateway that can be cut: open connections are reset, and new ones as well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Cable:
    """The connections through the proxy, whose address is `url`."""

    def __init__(self, to_url: str) -> None:
        self.url = ""
        self._there = urlsplit(to_url)
        self._is_cut = False
        self._ends: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset all connections until `mend`."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def mend(self) -> None:
        """Connect again."""
        self._is_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        answers, there = await asyncio.open_connection(self._there.hostname, self._there.port)
        self._ends |= {writer, there}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pass_on(reader, there))
            tasks.create_task(_pass_on(answers, writer))
        self._ends -= {writer, there}


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


@asynccontextmanager
async def cable(to_url: str) -> AsyncIterator[Cable]:
    """A proxy to a gateway, within the block."""
    found = Cable(to_url)
    server = await asyncio.start_server(found._serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
        found.cut()
