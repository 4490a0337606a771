"""Parsing of a NATS address: one server, or several of a cluster, separated by commas. Pure.

nats://a:4222,nats://b:4222,c        three servers; the scheme and the port are optional
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

PORT: Final = 4222


@dataclass(frozen=True, slots=True)
class Server:
    """One server.

    Attributes:
        url: as configured, with any secret in it; only for connecting.
        address: without secrets, for messages.
    """

    url: str
    address: str
    scheme: str

    @property
    def host_and_port(self) -> str:
        return self.address.partition("://")[2]


def servers_in(text: str) -> list[Server]:
    """Return the servers in `text`.

    Raises:
        ValueError: a port is invalid.
    """
    return [_server(part.strip()) for part in text.split(",")]


def _server(text: str) -> Server:
    url = text if "://" in text else f"nats://{text}"
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return Server(url, f"{parts.scheme}://{host}:{parts.port or PORT}", parts.scheme)
