"""What a NATS server's monitoring tells, over HTTP; asked once, at start."""

import asyncio
import http.client
from typing import Final
from urllib.parse import urlsplit

import msgspec

from shared.log.nats.durability import Varz
from shared.log.port import LogUnavailableError

_TIMEOUT_S: Final = 3.0
_MOST_BYTES: Final = 1 << 20


async def ask(monitor: str) -> Varz:
    """What the server behind `monitor` (`http://host:8222`) says of itself.

    Raises:
        LogUnavailableError: nobody answers there, or no NATS server.
    """
    try:
        return msgspec.json.decode(await asyncio.to_thread(_get, monitor), type=Varz)
    except (OSError, http.client.HTTPException, ValueError) as error:  # a msgspec.DecodeError is one
        raise LogUnavailableError(
            f"nats.monitors: {monitor} does not tell of a NATS server ({error}): is the server's `http_port` "
            "set, and is the address right?"
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
        return answer.read(_MOST_BYTES)
    finally:
        connection.close()
