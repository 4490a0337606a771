"""The socket, uvicorn, and how it ends.

The socket is bound before anything else, so that a port that is taken is one clear line. Signals are not
uvicorn's here: whoever runs the role cancels it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from shared.errors import ClientError

CUT_S: Final = 2
"""How long connections have to close once their answers are given, or given up."""


class ListenError(ClientError):
    """The address cannot be listened on."""

    code = "cannot_listen"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one.

    Raises:
        ListenError: the address is taken, or not ours.
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
        reason = error.strerror or error
        raise ListenError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` within the block. At its end what still runs is cut."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CUT_S,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        http = tasks.create_task(server.serve([listener]), name="http")
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait({http})  # in order, also when the block failed
            listener.close()
