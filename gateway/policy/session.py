"""The WebSocket at `/`, by which openpi's clients ask for actions, as a series of HTTP requests to ourselves.

    connection    GET /policy: its answer is the first message, or the refusal of the connection
    message       POST /policy: its answer is the reply, bytes; an error is a text, and the connection stays

The requests pass the whole application, so its middleware sees them. One message is answered at a time, and a
client that leaves meanwhile ends its request. The key is sent as `Authorization: Api-Key <key>` or `Bearer`.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

_LOGGER: Final = logging.getLogger(__name__)
PATH: Final = "/policy"
PREVIOUS_MS: Final = "policy_previous_ms"
"""The entry of the request's state with the duration of the connection's previous message, in ms."""
_OK: Final = 200
_OF_CONNECTION: Final = frozenset(
    {b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"expect"}
)
_SCHEMES: Final = {"ws": "http", "wss": "https"}


@dataclass(slots=True)
class _Answer:
    """The response to one of the requests."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def serve(websocket: WebSocket) -> None:
    """Serve one connection until its client leaves."""
    await websocket.receive()  # the wish to connect
    described = await _request(websocket, "GET")
    if described.status != _OK:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in described.headers}
        await websocket.send_denial_response(Response(bytes(described.body), described.status, headers))
        return
    await websocket.accept()
    connection = _Connection(websocket)
    try:
        await websocket.send_bytes(bytes(described.body))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(connection.read(), name="robot")
            await connection.answer()
            reading.cancel()
    except* WebSocketDisconnect:
        pass  # it left while an answer was sent


class _Connection:
    """The messages of one client. The next one is read while one is answered, and no further."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._left = asyncio.Event()

    async def read(self) -> None:
        """Read messages until the client leaves."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                self._left.set()
                await self._messages.put(None)
                return
            data = message.get("bytes")
            await self._messages.put((message.get("text") or "").encode() if data is None else data)

    async def answer(self) -> None:
        """Answer messages in their order."""
        state: dict[str, Any] = {}
        while (data := await self._messages.get()) is not None and not self._left.is_set():
            begun_s = time.monotonic()
            answer = await _request(self._websocket, "POST", data, left=self._left, state=state)
            if self._left.is_set():
                return
            if answer.status == _OK:
                await self._websocket.send_bytes(bytes(answer.body))
            else:
                await self._websocket.send_text(answer.body.decode("utf-8", "replace"))
            state = {PREVIOUS_MS: (time.monotonic() - begun_s) * 1000}


async def _request(
    websocket: WebSocket,
    method: str,
    body: bytes = b"",
    *,
    left: asyncio.Event | None = None,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> _Answer:
    """Send a request to our own application, with the headers of the connection; return its answer.

    `left` is set when the client leaves, which ends the request.
    """
    app: ASGIApp = websocket.scope["app"]
    answer = _Answer()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    try:
        await app(_scope(websocket.scope, method, len(body), state), receive, answer.send)
    except Exception:  # the application has answered with 500, or there is nothing to send
        if not answer.status:
            raise
        _LOGGER.exception("a bug while answering a robot")
    return answer


def _scope(handshake: Scope, method: str, size: int, state: Mapping[str, Any]) -> Scope:
    """The scope of a request with the headers of a connection's handshake."""
    headers = [(name, value) for name, value in handshake["headers"] if not _is_of_connection(name)]
    if method == "POST":
        headers += [(b"content-type", b"application/msgpack"), (b"content-length", str(size).encode())]
    return {
        "type": "http",
        "asgi": handshake["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": _SCHEMES[handshake["scheme"]],
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name, _as_bearer(value) if name == b"authorization" else value) for name, value in headers
        ],
        "client": handshake.get("client"),
        "server": handshake.get("server"),
        "state": dict(state),
    }


def _is_of_connection(name: bytes) -> bool:
    return name in _OF_CONNECTION or name.startswith(b"sec-websocket-")


def _as_bearer(value: bytes) -> bytes:
    """An `Authorization` header with the scheme that HTTP requests use."""
    scheme, _, secret = value.strip().partition(b" ")
    return b"Bearer " + secret.strip() if scheme.lower() == b"api-key" else value
