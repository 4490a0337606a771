"""Addresses on the command line: where to listen, and which NATS server to join."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from dalsegno.config.environment import NATS_TOKEN
from shared.errors import ClientError

_SCHEMES: Final = ("nats", "tls")
_LAST_PORT: Final = 65_535
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - read, not bound
"""A server that listens on all addresses is reached locally by loopback."""


class AddressError(ClientError):
    """An address that cannot be used."""

    code = "invalid_address"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The address of a gateway."""

    host: str
    port: int

    @property
    def reached_at(self) -> str:
        """The host name for connections from this machine."""
        return _EVERYWHERE.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reached_at}]" if ":" in self.reached_at else self.reached_at
        return f"http://{host}:{self.port}"


def free(host: str, port: int, count: int = 1) -> list[Listen]:
    """Find `count` free addresses at consecutive ports from `port` on; at any free ports if `port` is 0.

    Raises:
        AddressError: an address is in use or cannot be used.
    """
    if port + count - 1 > _LAST_PORT:  # the system would wrap around
        raise AddressError(
            f"cannot listen on {count} ports from {port} on: the last port is {_LAST_PORT}; "
            "choose a lower one with --port"
        )
    with ExitStack() as probes:  # all stay open until the last one is found, so that none is chosen twice
        return [probes.enter_context(_probe(host, port + number if port else 0)) for number in range(count)]


@contextmanager
def _probe(host: str, port: int) -> Iterator[Listen]:
    """Listen on an address while the context is open."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections in TIME_WAIT do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            yield Listen(host=host, port=probe.getsockname()[1])
    except OSError as error:
        why = error.strerror or str(error)
        raise AddressError(
            f"cannot listen on {host} port {port}: {why}; choose another with --host and --port"
        ) from error


def nats_url(text: str) -> str:
    """Normalise the address of a NATS server, or of several separated by commas.

    Raises:
        AddressError: the address is invalid, or contains a secret, which other users could see.
    """
    return ",".join(_nats_url(part.strip()) for part in text.split(","))


def _nats_url(text: str) -> str:
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        port = parts.port or 4222
    except ValueError as error:
        raise AddressError(f"{text!r} is not the address of a NATS server: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise AddressError(
            f"the NATS server's address contains a secret that others can see: put the token in {NATS_TOKEN}"
        )
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query:
        raise AddressError(f"{text!r} is not the address of a NATS server: expected nats://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
