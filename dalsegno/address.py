"""Addresses a person types: where to listen, and which NATS to join. Wrong ones are refused at once."""

import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from dalsegno.environment import NATS_TOKEN
from shared.errors import ClientError

_SCHEMES: Final = ("nats", "tls")
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - read, not bound
"""Listening everywhere, a server is reached from here by loopback."""


class AddressError(ClientError):
    """An address that cannot be used; says which and why."""

    code = "invalid_address"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where the gateway listens."""

    host: str
    port: int

    @property
    def reached_at(self) -> str:
        """The host by which this machine reaches it."""
        return _EVERYWHERE.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reached_at}]" if ":" in self.reached_at else self.reached_at
        return f"http://{host}:{self.port}"


def free(host: str, port: int) -> Listen:
    """An address on which nobody listens yet; with port 0, one the system picks.

    Raises:
        AddressError: it is taken, or cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of a dead server in TIME_WAIT are no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return Listen(host=host, port=probe.getsockname()[1])
    except OSError as error:
        why = error.strerror or str(error)
        raise AddressError(
            f"cannot listen on {host} port {port}: {why}; choose another with --host and --port"
        ) from error


def nats_url(text: str) -> str:
    """`text` as the address of a NATS server.

    Raises:
        AddressError: it is none, or carries a secret: arguments are for all to see.
    """
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        port = parts.port or 4222
    except ValueError as error:
        raise AddressError(f"{text!r} is no address of a NATS server: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise AddressError(
            f"the NATS server's address carries a secret that others can see: put the token in {NATS_TOKEN}"
        )
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query:
        raise AddressError(f"{text!r} is no address of a NATS server: expected nats://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"
