"""The studio's web server: the data, and the files of its pages, behind the door. It binds 127.0.0.1.

In a container it binds the container's address, and the port is published on the machine's loopback; the
names by which browsers may reach it stay the same (`dalsegno.studio.access`).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dalsegno.studio.access import Access, Door
from dalsegno.studio.api import Api
from dalsegno.studio.asking import Asker
from dalsegno.studio.following import Follower
from dalsegno.studio.recordings import Shelf
from shared.errors import ClientError

LOOPBACK: Final = "127.0.0.1"
STATIC: Final = Path(__file__).with_name("static")
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_CLOSING_S: Final = 1


def application(
    shelf: Shelf, door: Door, follower: Follower | None = None, asker: Asker | None = None
) -> ASGIApp:
    """Return the whole application."""

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        if follower is None:
            yield
            return
        task = asyncio.create_task(follower.follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    files = [Route("/", _file("index.html")), *(Route(f"/{name}", _file(name)) for name in static_files())]
    app = Starlette(
        routes=[*files, *Api(shelf, follower, asker).routes],
        exception_handlers={404: _not_found},
        lifespan=running,
    )
    return Access(app, door)


def static_files() -> list[str]:
    """The names of the pages' files, which are all that is served of any folder."""
    return sorted(path.name for path in STATIC.iterdir() if path.suffix in _TYPES)


def bind(port: int, host: str = LOOPBACK) -> socket.socket:
    """Return a listening socket on an IPv4 address of this machine; port 0 is any free one.

    It listens at once, so that a link can be printed before the server runs: connections wait.

    Raises:
        ClientError: the port is in use, or the address is not one of this machine.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()
    except OSError as error:
        bound.close()
        where = f"port {port}" if host == LOOPBACK else f"{host}:{port}"
        raise ClientError(
            f"{where} cannot be used: {error.strerror}; leave --port out for a free one"
        ) from error
    return bound


async def serve(app: ASGIApp, bound: socket.socket) -> None:
    """Serve until a signal to stop."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CLOSING_S,
    )
    await uvicorn.Server(config).serve(sockets=[bound])


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the answer with one file; it is read each time, so that a developer sees changes."""

    async def answer(request: Request) -> Response:
        content = await asyncio.to_thread((STATIC / name).read_bytes)
        return Response(content, media_type=_TYPES[Path(name).suffix])

    return answer


async def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse("There is no such page.", status_code=404)
