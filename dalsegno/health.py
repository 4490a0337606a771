"""One look at a gateway's `/health/ready`, without an HTTP library: the launcher must start quickly."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any, Final

_PATIENCE_SECONDS: Final = 2.0
_MOST_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class Health:
    """What a gateway said of itself."""

    ready: bool
    details: dict[str, Any]


async def look(host: str, port: int) -> Health | None:
    """Ask once; None while nobody answers, or answers something else."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await _ask(host, port)
    return None


async def _ask(host: str, port: int) -> Health:
    reader, writer = await asyncio.open_connection(host, port, limit=_MOST_BYTES)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET /health/ready HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = await reader.read(_MOST_BYTES)
    finally:
        writer.close()
    status = int(head.split(maxsplit=2)[1])
    details = json.loads(body) if body else {}
    return Health(ready=status == 200, details=details if isinstance(details, dict) else {})
