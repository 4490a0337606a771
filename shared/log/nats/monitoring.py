"""A NATS server's monitoring data, read once over HTTP at the start."""

import asyncio
import http.client
from typing import Final
from urllib.parse import urlsplit

import msgspec

from shared.log.nats.durability import Varz
from shared.log.port import LogUnavailableError

_TIMEOUT_S: Final = 3.0
_MAX_BYTES: Final = 1 << 20


async def read(monitor: str) -> Varz:
    """Return the monitoring data of the server at `monitor` (`http://host:8222`).

    Raises:
        LogUnavailableError: the address does not answer, or is not a NATS server.
    """
    try:
        return msgspec.json.decode(await asyncio.to_thread(_get, monitor), type=Varz)
    except (OSError, http.client.HTTPException, ValueError) as error:  # includes msgspec.DecodeError
        raise LogUnavailableError(
            f"nats.monitors: expected the monitoring of a NATS server at {monitor} ({error}): is the "
            "server's `http_port` set, and is the address right?"
        ) from error


def _get(monitor: str) -> bytes:
    parts = urlsplit(monitor)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/varz")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        return answer.read(_MAX_BYTES)
    finally:
        connection.close()
