"""Looking a server's name up, so that a name nobody knows holds nobody up.

The event loop's own way is a pool of few threads. A lookup there cannot be given up: while a name server is
away each attempt to connect leaves one behind, they queue, fail with nobody listening, and a process that is
told to stop waits for all of them (33 s; 2026-11). Here a name is looked up by one daemon thread at a time,
whoever asks meanwhile shares it, and the end of the process does not wait.
"""

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread


class NameLookup:
    """The lookups under way; for one event loop."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], asyncio.Future[list[str] | OSError]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of `host`, in the order in which they are to be tried. May be given up at any time.

        Raises:
            OSError: it has none, or no name server says so.
        """
        with suppress(ValueError):
            return [str(ip_address(host))]
        lookup = self._lookups.get((host, port))
        if lookup is None:
            lookup = self._lookups[host, port] = self._begin(host, port)
        found = await asyncio.shield(lookup)
        if isinstance(found, OSError):
            raise found
        return found

    def _begin(self, host: str, port: int) -> "asyncio.Future[list[str] | OSError]":
        loop = asyncio.get_running_loop()
        lookup: asyncio.Future[list[str] | OSError] = loop.create_future()

        def settle(found: list[str] | OSError) -> None:
            del self._lookups[host, port]
            lookup.set_result(found)  # an error too: there may be nobody left who would take it

        def look() -> None:
            found: list[str] | OSError
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(info[4][0]) for info in infos))
            except OSError as error:
                found = error
            except UnicodeError as error:
                found = OSError(f"{host!r} is no host name: {error}")
            with suppress(RuntimeError):  # the loop is closed: it ended without waiting
                loop.call_soon_threadsafe(settle, found)

        Thread(target=look, name=f"lookup {host}", daemon=True).start()
        return lookup
