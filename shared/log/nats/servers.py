"""Which servers an address names: one, or those of a cluster with commas between them. Pure.

nats://a:4222,nats://b:4222,c        three servers; the scheme and the port may be left out
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

PORT: Final = 4222


@dataclass(frozen=True, slots=True)
class Server:
    """One server.

    Attributes:
        url: as it was told, with the secret it may hold; only for connecting.
        address: without that, for people.
    """

    url: str
    address: str
    scheme: str

    @property
    def host_and_port(self) -> str:
        return self.address.partition("://")[2]


def servers_in(text: str) -> list[Server]:
    """The servers that `text` names.

    Raises:
        ValueError: one of them has a port that is none.
    """
    return [_server(part.strip()) for part in text.split(",")]


def _server(text: str) -> Server:
    url = text if "://" in text else f"nats://{text}"
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return Server(url, f"{parts.scheme}://{host}:{parts.port or PORT}", parts.scheme)
