"""One request to a gateway's `/health/ready`, without an HTTP library: the launcher must start quickly."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

_PATIENCE_S: Final = 2.0
_MOST_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """A gateway's readiness, and what it still waits for."""

    ready: bool
    missing: tuple[str, ...] = ()


async def look(host: str, port: int) -> GatewayHealth | None:
    """Ask once; None if the gateway does not answer, or answers something else."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PATIENCE_S):
            return await _ask(host, port)
    return None


async def _ask(host: str, port: int) -> GatewayHealth:
    reader, writer = await asyncio.open_connection(host, port, limit=_MOST_BYTES)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(
            f"GET /health/ready HTTP/1.0\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = await reader.read()
    finally:
        writer.close()
    if head.split()[1:2] == [str(HTTPStatus.OK.value)]:
        return GatewayHealth(ready=True)
    answer = json.loads(body)
    missing = answer.get("missing", ()) if isinstance(answer, dict) else ()
    return GatewayHealth(ready=False, missing=tuple(str(one) for one in missing))
