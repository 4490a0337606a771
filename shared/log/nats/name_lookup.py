"""Host name lookups that never delay a connection attempt or the end of the process.

The event loop's own lookups use a small thread pool and cannot be cancelled. While a name server is away,
each connection attempt leaves one lookup in the pool's queue, and a process that is stopped waits for all
of them (33 s; 2026-11). Here one daemon thread at a time looks a name up, concurrent callers share the
result, and the process does not wait for it at its end.
"""

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread


class NameLookup:
    """The running lookups of one event loop."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], asyncio.Future[list[str] | OSError]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host`, in the order in which to try them. The call may be cancelled.

        Raises:
            OSError: the host has no address, or no name server answers.
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
            lookup.set_result(found)  # errors as well: an exception that no caller retrieves would be logged

        def look() -> None:
            found: list[str] | OSError
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(info[4][0]) for info in infos))
            except OSError as error:
                found = error
            except UnicodeError as error:
                found = OSError(f"{host!r} is not a host name: {error}")
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, found)

        Thread(target=look, name=f"lookup {host}", daemon=True).start()
        return lookup
