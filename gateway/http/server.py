"""The HTTP server: its listening socket, uvicorn, and its shutdown.

The socket is bound before anything else, so that a port in use is one clear error. uvicorn handles no signals
here: the process that runs the role cancels it.
"""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final, cast

import uvicorn
from starlette.types import ASGIApp

from configs.deployment import GatewaySettings
from gateway.http.connection import ConnectionLimits, HttpConnection
from shared.errors import CapacityError, ClientError, DalSegnoError

CUT_S: Final = 2
"""The time in which connections must close after the last answers."""
_OTHER_FILES: Final = 256


class ListenError(ClientError):
    """The address cannot be listened on."""

    code = "cannot_listen"


class PortTakenError(CapacityError):
    """Another process has the port: often the previous gateway, which still drains."""

    code = "port_taken"


class _Server(uvicorn.Server):
    """uvicorn's server, which exits at once when asked to; uvicorn polls ten times a second."""

    def __init__(self, config: uvicorn.Config, check_every_s: float) -> None:
        super().__init__(config)
        self._check_every_s = check_every_s
        self._exit_requested = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Check the connections' time limits, and update the `date` of answers, until `exit`."""
        while not await self.on_tick(0):  # 0: uvicorn counts ticks, and sets the date at every tenth
            now_s = time.monotonic()
            for connection in _connections(self):
                connection.check_timeouts(now_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_every_s):
                    await self._exit_requested.wait()

    def exit(self) -> None:
        """Accept no new connections, and close the existing ones."""
        self.should_exit = True
        self._exit_requested.set()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one.

    Raises:
        ListenError: the address cannot be used.
        PortTakenError: another process listens there.
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
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    settings: GatewaySettings | None = None,
    *,
    logs_requests: bool = True,
    websockets: bool = False,
    on_refusal: Callable[[DalSegnoError, str], None] | None = None,
) -> AsyncIterator[None]:
    """Serve `app` within the block. At its end the remaining connections are closed.

    Args:
        app: the application.
        listener: the socket.
        settings: of the gateway.
        logs_requests: log requests that are refused before they reach the application.
        websockets: accept WebSockets, too; otherwise their offers are ignored.
        on_refusal: called with the error of each request that is refused before it reaches the application,
            and with the request's name in the response.
    """
    settings = settings or GatewaySettings()
    limits = ConnectionLimits(
        connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        send_timeout_s=settings.send_timeout_s,
        logs_requests=logs_requests,
        websockets=websockets,
        on_refusal=on_refusal,
    )
    config = uvicorn.Config(
        app,
        http=cast("type[HttpConnection]", partial(HttpConnection, limits=limits)),
        timeout_keep_alive=cast("int", settings.idle_timeout_s),  # uvicorn accepts fractions
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # images are noise to it
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CUT_S + 1,
    )
    server = _Server(config, limits.check_every_s)
    _raise_file_limit(settings.max_connections)
    async with asyncio.TaskGroup() as tasks:
        http = tasks.create_task(server.serve([listener]), name="http")
        try:
            yield
        finally:
            server.exit()
            await asyncio.wait({http}, timeout=CUT_S)  # in order, even if the block failed
            for connection in _connections(server):  # clients that do not read
                connection.client_transport.transport.abort()
            await asyncio.wait({http})
            listener.close()


def _connections(server: uvicorn.Server) -> list[HttpConnection]:
    return [one for one in server.server_state.connections if isinstance(one, HttpConnection)]


def _raise_file_limit(connections: int) -> None:
    """Raise the limit of open files, since each connection is one and the default limit is low."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if few != resource.RLIM_INFINITY and few < wanted:
        room = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(few, room), most))
