"""A minimal HTTP client for streamed chats, on asyncio's streams.

A general client takes a third of a millisecond per chunk, which would dominate the measurement; this one
takes about 20 us. It supports only what the gateway sends: keep-alive, chunked bodies, server-sent events.
"""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec

_DATA: Final = b"data: "


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None


_DECODER: Final = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Reply:
    """One answer and the times of its parts, in seconds after the request was sent; `text_s` of each text."""

    first_s: float = 0.0
    end_s: float = 0.0
    chunks: int = 0
    texts: list[str] = field(default_factory=list)
    text_s: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response. The keys of `headers` are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The text of a chat response, streamed or not."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            message: str = msgspec.json.decode(self.body)["choices"][0]["message"]["content"]
            return message
        reply = Reply()
        _fold(reply, self.body, 0.0)
        if not self.body.endswith(b"data: [DONE]\n\n"):
            raise ValueError("the stream did not end with [DONE]")
        return reply.text


class Connection:
    """One connection, for requests one after another; `key` is the API key, if one is required."""

    def __init__(self, url: str, *, key: str = "") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        self._headers = f"Host: localhost\r\n{bearer}".encode()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: dict[str, Any]) -> Response:
        """Post JSON and read the response, of any status."""
        await self.send(path, body)
        return await self._response()

    async def get(self, path: str) -> Response:
        """Get a page."""
        self._writer.write(b"GET %s HTTP/1.1\r\n%s\r\n" % (path.encode(), self._headers))
        return await self._response()

    async def send(self, path: str, body: dict[str, Any]) -> None:
        """Post JSON; the caller reads the response."""
        data = msgspec.json.encode(body)
        self._writer.write(
            b"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), self._headers, len(data), data)
        )
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the status and headers of the response."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = (line.split(":", 1) for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}

    async def _response(self) -> Response:
        status, headers = await self.head()
        if "content-length" in headers:
            return Response(status, headers, await self._reader.readexactly(int(headers["content-length"])))
        pieces: list[bytes] = []
        while piece := await self._chunk():
            pieces.append(piece)
        return Response(status, headers, b"".join(pieces))

    async def gaps_s(self, question: dict[str, Any]) -> list[float]:
        """Post one streamed chat; return the times between its texts, as they arrive."""
        reply = await self.ask(question)
        return [later - before for before, later in pairwise(reply.text_s)]

    async def ask(self, question: dict[str, Any]) -> Reply:
        """Post one streamed chat and read its answer to the end."""
        body = msgspec.json.encode(question | {"stream": True, "stream_options": {"include_usage": True}})
        begun_s = time.perf_counter()
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\n%s"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (self._headers, len(body), body)
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or b"transfer-encoding: chunked" not in head.lower():
            raise RuntimeError(f"expected a streamed 200, found {head.decode()}")
        reply = Reply()
        while piece := await self._chunk():
            reply.chunks += 1
            _fold(reply, piece, begun_s)
        reply.end_s = time.perf_counter() - begun_s
        return reply

    async def _chunk(self) -> bytes:
        """Read one chunk of the body; empty at its end."""
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2]


def _fold(reply: Reply, piece: bytes, begun_s: float) -> None:
    for line in piece.split(b"\n"):
        if not line.startswith(_DATA) or line.endswith(b"[DONE]"):
            continue
        event = _DECODER.decode(line[len(_DATA) :])
        if event.usage is not None:
            reply.tokens = event.usage["completion_tokens"]
        for choice in event.choices:
            if choice.delta.content:
                reply.text_s.append(time.perf_counter() - begun_s)
                reply.first_s = reply.first_s or reply.text_s[0]
            reply.texts.append(choice.delta.content)
