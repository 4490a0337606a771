"""The socket, uvicorn, and how it ends.

The socket is bound before anything else, so that a port that is taken is one clear line. Signals are not
uvicorn's here: whoever runs the role cancels it.
"""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final, cast

import uvicorn
from starlette.types import ASGIApp

from configs.deployment import GatewaySettings
from gateway.http.connection import Connection, ConnectionLimits
from shared.errors import CapacityError, ClientError

CUT_S: Final = 2
"""How long connections have to close once their answers are given, or given up."""
_OTHER_FILES: Final = 256


class ListenError(ClientError):
    """The address cannot be listened on."""

    code = "cannot_listen"


class PortTakenError(CapacityError):
    """Another process has the port: as a rule the gateway before this one, which still drains."""

    code = "port_taken"


class _Server(uvicorn.Server):
    """uvicorn's, which ends when it is told to; its own asks ten times a second."""

    def __init__(self, config: uvicorn.Config, look_every_s: float) -> None:
        super().__init__(config)
        self._look_every_s = look_every_s
        self._told = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """End what clients leave unfinished, and keep the date of answers, until told to exit."""
        while not await self.on_tick(0):  # 0: it counts ticks, and sets the date at every tenth
            now_s = time.monotonic()
            for connection in _connections(self):
                connection.look(now_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._told.wait()

    def exit(self) -> None:
        """Take nothing new, and close what is there."""
        self.should_exit = True
        self._told.set()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one.

    Raises:
        ListenError: the address is not ours.
        PortTakenError: somebody listens there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        taken = error.errno == errno.EADDRINUSE
        raise (PortTakenError(message) if taken else ListenError(message)) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, settings: GatewaySettings | None = None
) -> AsyncIterator[None]:
    """Serve `app` within the block. At its end what still runs is cut."""
    settings = settings or GatewaySettings()
    limits = ConnectionLimits(
        connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )
    config = uvicorn.Config(
        app,
        http=cast("type[Connection]", partial(Connection, limits=limits)),
        timeout_keep_alive=cast("int", settings.idle_timeout_s),  # a fraction is fine with it
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CUT_S + 1,
    )
    server = _Server(config, limits.look_every_s)
    _room_for_files(settings.max_connections)
    async with asyncio.TaskGroup() as tasks:
        http = tasks.create_task(server.serve([listener]), name="http")
        try:
            yield
        finally:
            server.exit()
            await asyncio.wait({http}, timeout=CUT_S)  # in order, also when the block failed
            for connection in _connections(server):  # what its client does not take
                connection.wire.transport.abort()
            await asyncio.wait({http})
            listener.close()


def _connections(server: uvicorn.Server) -> list[Connection]:
    return [one for one in server.server_state.connections if isinstance(one, Connection)]


def _room_for_files(connections: int) -> None:
    """A connection is a file, and by default a process may have few: as many as it is allowed, then."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if few != resource.RLIM_INFINITY and few < wanted:
        room = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(few, room), most))
