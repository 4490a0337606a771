"""A client for concurrent streamed completions over HTTP, for peers that are servers.

It uses asyncio's streams, because a general client takes a third of a millisecond per chunk on the measured
machine. It supports only server-sent events in a chunked body, with one JSON object per event.

Each token of the checkpoint has exactly one space, at its start, so a text has as many tokens as spaces; the
usage reported by the server must agree.
"""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.protocol import Answer

_DATA = b"data: "


def complete(url: str, model: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Send all prompts at once.

    Raises:
        RuntimeError: the server did not stream an answer, or streamed another number of tokens than it
        reports.
    """

    async def ask() -> list[Answer]:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_ask(url, model, ids, max_tokens, begun_s)) for ids in prompts]
        return [task.result() for task in asked]

    return asyncio.run(ask())


async def _ask(url: str, model: str, ids: list[int], max_tokens: int, begun_s: float) -> Answer:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(_question(model, ids, max_tokens))
        return await _answer(reader, begun_s)
    finally:
        writer.close()
        with suppress(OSError):  # the server may have closed the connection first
            await writer.wait_closed()


def _question(model: str, ids: list[int], max_tokens: int) -> bytes:
    question = {
        "model": model,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(question).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )


async def _answer(reader: asyncio.StreamReader, begun_s: float) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"transfer-encoding: chunked" not in head.lower():
        raise RuntimeError(
            f"expected a streamed 200, found {head.decode()}{(await reader.read(4096)).decode()}"
        )
    answer = Answer()
    usage: dict[str, Any] = {}
    left = b""
    while size := int(await reader.readline(), 16):
        *events, left = (left + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        now_s = time.perf_counter() - begun_s
        for event in events:
            if event.startswith(_DATA) and not event.startswith(b"data: [DONE]"):
                found = json.loads(event[len(_DATA) :])
                usage = found.get("usage") or usage
                for choice in found.get("choices", []):
                    answer.text += choice["text"]
                    answer.arrivals += [now_s] * choice["text"].count(" ")
    if usage.get("completion_tokens") != len(answer.arrivals):
        raise RuntimeError(f"expected as many tokens as the usage says, {usage}, found {answer.text!r}")
    return answer
