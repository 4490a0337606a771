"""A gateway that runs batches, on a log in memory."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from gateway.batches.runner import BatchRunner
from gateway.batches.state import BatchState, fold_records
from shared.events import BatchEnded, decode
from shared.log.memory import MemoryLog
from shared.log.port import Log
from tests.gateway.world import World

CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A line that asks for an answer to a text."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    """Run batches at the world's gateway within the block."""

    @asynccontextmanager
    async def open_log() -> AsyncGenerator[Log, None]:
        yield MemoryLog(world.server)

    world.second.connected(None)
    task = asyncio.create_task(
        BatchRunner(world.gateway, world.app.answer, world.batches, world.second).run(open_log)
    )
    await world.until(lambda: world.second.is_connected)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def uploaded(world: World, data: bytes, **headers: str) -> str:
    """Store a file of lines; return its id."""
    response = await world.client.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, headers=headers
    )
    assert response.status_code == 200, response.text
    assert response.json()["purpose"] == "batch"
    return str(response.json()["id"])


async def created(world: World, lines: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """A new batch of chats."""
    file_id = await uploaded(world, jsonl(lines))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | fields
    response = await world.client.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def states(world: World) -> dict[str, BatchState]:
    """The states of all batches on the log."""
    found: dict[str, BatchState] = {}
    for record in world.server.records:
        if record.subject.startswith(world.subjects.batch("")):
            fold_records(found, record, world.subjects)
    return found


async def until_ended(world: World, batch_id: str) -> None:
    """Wait for the end of a batch on the log."""
    async with (
        asyncio.timeout(30),
        aclosing(MemoryLog(world.server).read([world.subjects.batch(batch_id)], 1)) as records,
    ):
        async for record in records:
            if isinstance(decode(record.data), BatchEnded):
                break


async def ended(world: World, batch_id: str) -> dict[str, Any]:
    """A batch once it has ended."""
    await until_ended(world, batch_id)
    response = await world.client.get(f"/v1/batches/{batch_id}")
    found: dict[str, Any] = response.json()
    return found


async def results(world: World, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; none of no file."""
    if file_id is None:
        return []
    response = await world.client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200, response.text
    return [json.loads(one) for one in response.text.splitlines()]


def said(result: dict[str, Any]) -> str:
    """The answer of a line."""
    return str(result["response"]["body"]["choices"][0]["message"]["content"])
