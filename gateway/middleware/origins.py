"""Middleware that refuses requests which a web page of another origin makes a browser send.

A gateway on this machine, or in a private network, can be reached by the browser of anybody there, and so by
every page that this browser shows. Two headers that pages cannot forge tell such requests apart:

- `Origin`, the page's origin. Browsers send it with every POST, and with every read that a script could see.
- `Sec-Fetch-Site`, the relation between page and gateway: with requests that have no `Origin`, too.

Pages of `cors_origins` may send requests, and pages of the gateway's own origin: its scheme and `Host`, or,
if the browser says `same-origin`, its `Host` (a proxy that terminates TLS changes the scheme). So `Host` is
checked as well: a page may have its own name resolve to this machine (DNS rebinding), and then its origin is
the gateway's. While the gateway listens on loopback, only loopback names are right; otherwise `allowed_hosts`
has the names. Programs other than browsers send neither header, and in `Host` the address they were given.
"""

import re
import socket
from collections.abc import Awaitable, Sequence
from ipaddress import ip_address
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from configs.deployment import GatewaySettings
from gateway import errors
from gateway.errors import ErrorResponse
from gateway.middleware.exchange import Exchange, Middleware
from shared.errors import ClientError

ANY: Final = "*"
_SAME: Final = "same-origin"
_OTHER_SITES: Final = ("cross-site", "same-site")
_READS: Final = ("GET", "HEAD")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_HOST: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]*))?")
"""A `Host`: an IPv6 address in brackets, or a name, and maybe a port."""


class HostNotAllowedError(ClientError):
    """The request's `Host` is no name of this gateway."""

    code = "host_not_allowed"
    status = 403

    def __init__(self, host: str) -> None:
        super().__init__(
            f"Host: {host[:200]!r} is no name of this gateway; use its address, or add the name to "
            "gateway.allowed_hosts of its configuration"
        )


class OriginNotAllowedError(ClientError):
    """A web page of another origin sent the request."""

    code = "origin_not_allowed"
    status = 403

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found[:200]}: web pages of other origins may not send requests to this gateway; add the "
            "page's origin to gateway.cors_origins of its configuration"
        )


class OriginCheck(Middleware):
    """Refuses requests by `Host`, `Origin` and `Sec-Fetch-Site`."""

    def __init__(self, app: ASGIApp, *, settings: GatewaySettings) -> None:
        super().__init__(app)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.cors_origins)
        self._hosts = HostNames(settings.allowed_hosts, is_open=not listens_on_loopback(settings.host))

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        refusal = self._refusal(scope)
        if refusal is not None:
            return ErrorResponse(errors.of_exception(refusal))(scope, receive, send)
        return self._next(exchange, scope, receive, send)

    def _refusal(self, scope: Scope) -> ClientError | None:
        host: str | None = None
        site = mode = ""
        origins: list[str] = []
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").lower()
            elif name == b"sec-fetch-mode":
                mode = value.decode("latin-1").lower()
        if host is not None and not self._hosts.have(host):
            return HostNotAllowedError(host)
        if not (origins or site) or ANY in self._origins:
            return None
        is_navigation = mode == "navigate" and scope["method"] in _READS
        own = (scope["scheme"], host or "")
        return self._refusal_of_page(own, origins, "" if is_navigation else site)

    def _refusal_of_page(
        self, own: tuple[str, str], origins: Sequence[str], site: str
    ) -> OriginNotAllowedError | None:
        """The refusal of a request that a browser sent to `own`, our scheme and host, if its page may not."""
        others = [origin for origin in origins if origin not in self._origins]
        if origins and not others:
            return None
        for origin in others:
            if not _is_same(origin, own, any_scheme=site == _SAME):
                return OriginNotAllowedError(f"Origin: {origin}")
        return OriginNotAllowedError(f"Sec-Fetch-Site: {site}") if site in _OTHER_SITES else None


class HostNames:
    """The names to which a gateway answers; if it `is_open` and has no list, all of them."""

    def __init__(self, allowed: Sequence[str], *, is_open: bool) -> None:
        entries = [entry.strip().lower() for entry in allowed]
        self._names = frozenset(_name(entry) or entry for entry in entries)  # or an IPv6 address alone
        self._suffixes = tuple(entry[1:] for entry in self._names if entry.startswith("*."))
        self._is_any = ANY in self._names or (is_open and not allowed)

    def have(self, host: str) -> bool:
        """True for a `Host`, in lower case and with or without a port, that names this gateway."""
        if self._is_any:
            return True
        name = _name(host)
        return is_loopback(name) or name in self._names or name.endswith(self._suffixes)


def is_loopback(name: str) -> bool:
    """True for a name or an address of this machine that no other machine reaches."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def listens_on_loopback(host: str) -> bool:
    """True if a socket that is bound to `host` (`127.1`, a name in the hosts file) is on loopback only."""
    if is_loopback(host):
        return True
    try:
        found = {ip_address(str(info[4][0]).partition("%")[0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False  # the bind will fail, too
    return all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in found)


def _name(host: str) -> str:
    """The name or address in a `Host`, without brackets, port and final dot; empty if it is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).removesuffix(".") if found else ""


def _is_same(origin: str, own: tuple[str, str], *, any_scheme: bool) -> bool:
    """True if `origin` is our scheme and host."""
    scheme, separator, authority = origin.partition("://")
    own_scheme, own_host = own
    if not separator or (scheme != own_scheme and not any_scheme):
        return False
    wanted = _with_port(scheme, own_host)
    return wanted is not None and _with_port(scheme, authority) == wanted


def _with_port(scheme: str, host: str) -> tuple[str, str] | None:
    """The name and the port of a host, the scheme's default port included; None if it is malformed."""
    found = _HOST.fullmatch(host)
    return (_name(host), found[3] or _DEFAULT_PORTS.get(scheme, "")) if found else None
