"""A faulty gateway proxy: it falsifies one thing in each answer, to prove that the checker notices."""

import asyncio
import contextlib
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import httpx

Lie: TypeAlias = Callable[[list[bytes]], list[bytes]]
"""What is told of an answer's units: lines, or server-sent events. The fourth and fifth are chunks."""


def duplicated(units: list[bytes]) -> list[bytes]:
    return [*units[:5], units[4], *units[5:]]


def dropped(units: list[bytes]) -> list[bytes]:
    return [*units[:4], *units[5:]]


def swapped(units: list[bytes]) -> list[bytes]:
    return [*units[:3], units[4], units[3], *units[5:]]


def altered(units: list[bytes]) -> list[bytes]:
    """Change one letter of the text."""
    unit = units[4]
    if not unit.startswith(b"{"):
        head, _, data = unit.partition(b"data: ")
        event = json.loads(data)
        choice = event["choices"][0]
        place = choice.get("delta", choice)
        name = "content" if "delta" in choice else "text"
        place[name] = _other(place[name])
        return [*units[:4], head + b"data: " + json.dumps(event).encode() + b"\n\n", *units[5:]]
    line = json.loads(unit)
    line["data"] = b64encode(_other(b64decode(line["data"]).decode()).encode()).decode()
    return [*units[:4], json.dumps(line).encode() + b"\n", *units[5:]]


def ended_twice(units: list[bytes]) -> list[bytes]:
    """Repeat the end; of events, all those that form it."""
    end = next(place for place, unit in enumerate(units) if _is_end(unit))
    return [*units[:end], units[end], *units[end:]]


def ended_early(units: list[bytes]) -> list[bytes]:
    """Move the end before the last chunk."""
    end = next(place for place, unit in enumerate(units) if _is_end(unit))
    return [*units[: end - 1], units[end], units[end - 1], *units[end + 1 :]]


def _is_end(unit: bytes) -> bool:
    return b'"finish_reason":"' in unit


def _other(text: str) -> str:
    return ("x" if text[:1] != "x" else "y") + text[1:]


@asynccontextmanager
async def lying(url: str, lie: Lie) -> AsyncGenerator[str, None]:
    """A server that forwards to the gateway at `url`, and passes each whole answer through `lie`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(fields["content-length"]))
            async with httpx.AsyncClient(timeout=60.0) as http:
                answer = await http.post(
                    url + lines[0].split(" ")[1], content=body, headers={"content-type": "application/json"}
                )
            is_events = answer.headers["content-type"].startswith("text/event-stream")
            end = b"\n\n" if is_events else b"\n"
            units = [unit + end for unit in answer.content.split(end) if unit]
            kind = answer.headers["content-type"].encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: %s\r\n\r\n" % kind)
            writer.write(b"".join(lie(units)))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
