import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from dalsegno.serve import readiness
from dalsegno.serve.readiness import GatewayHealth

pytestmark = pytest.mark.processes


Answering = Callable[[bytes], AbstractAsyncContextManager[int]]


@pytest.fixture
def answering() -> Answering:
    """A server that answers everybody the same."""

    @asynccontextmanager
    async def serve(answer: bytes) -> AsyncIterator[int]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    return serve


async def test_200_is_ready(answering: Answering) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n{}") as port:
        assert await readiness.look("127.0.0.1", port) == GatewayHealth(ready=True)


async def test_503_says_what_is_missing(answering: Answering) -> None:
    body = json.dumps({"missing": ["no conductor leads", "the worker of rank 0 is loading (40%)"]})
    async with answering(f"HTTP/1.1 503 Service Unavailable\r\n\r\n{body}".encode()) as port:
        assert await readiness.look("127.0.0.1", port) == GatewayHealth(
            ready=False, missing=("no conductor leads", "the worker of rank 0 is loading (40%)")
        )


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1\r\n\r\n", b"HTTP/1.1 503 x\r\n\r\n<h1>", b"?\r\n\r\n"])
async def test_an_answer_of_somebody_else_is_none(answering: Answering, answer: bytes) -> None:
    async with answering(answer) as port:
        assert await readiness.look("127.0.0.1", port) is None


async def test_nobody_there_is_no_answer() -> None:
    assert await readiness.look("127.0.0.1", 1) is None
