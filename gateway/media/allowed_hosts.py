"""The hosts from which the gateway loads media: `media.allowed_hosts`, and the addresses they may have.

A listed host is not trusted to have a harmless address: whoever controls its DNS chooses it. So an address is
checked after it was resolved, and the connection goes to that address. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, TypeAlias

import httpx

IpAddress: TypeAlias = IPv4Address | IPv6Address

_LOCAL_NAMES: Final = ("localhost", "localhost.localdomain", "ip6-localhost")
_TRANSLATED: Final = ip_network("64:ff9b::/96")
"""The addresses by which IPv6 hosts reach IPv4 ones (NAT64): the last 32 bits are the IPv4 address."""


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of the list.

    Attributes:
        host: the name or address in lower case, in ASCII as DNS knows it; empty if `suffix` decides.
        suffix: `.example` for `*.example`, `.` for `*`.
        port: the only port; None allows all.
    """

    host: str
    suffix: str
    port: int | None

    @classmethod
    def of(cls, entry: str) -> "HostRule":
        """Parse an entry.

        Raises:
            ValueError: it is none.
        """
        host, port = _split_port(entry.strip().lower().rstrip("."))
        host = _in_ascii(host)
        if host == "*":
            return cls("", ".", port)
        if host.startswith("*.") and len(host) > 2 and "*" not in host[1:]:
            return cls("", host[1:], port)
        if not host or any(char in host for char in "*/@ ?#"):
            raise ValueError(f"expected a host such as images.example, *.example or *, found {entry!r}")
        return cls(host, "", port)

    def matches(self, host: str, port: int) -> bool:
        """Return whether the rule names this host."""
        if self.port is not None and self.port != port:
            return False
        if self.suffix:
            return self.suffix == "." or host.endswith(self.suffix)
        return host == self.host


def _in_ascii(host: str) -> str:
    """The host as DNS knows it: `xn--bcher-kva.example` for `bücher.example`."""
    if host.isascii():
        return host
    wildcard, name = ("*.", host[2:]) if host.startswith("*.") else ("", host)
    try:
        return wildcard + httpx.URL(f"http://{name}/").raw_host.decode("ascii")
    except httpx.InvalidURL as error:
        raise ValueError(f"expected a host such as images.example, found {host!r}: {error}") from error


def _split_port(entry: str) -> tuple[str, int | None]:
    """The host and the port of `host`, `host:port`, `[v6]` or `[v6]:port`, or of an IPv6 address alone."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, ""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"expected a port from 1 to 65535, found {port!r}")
    return host, int(port) if port else None


class AllowedHosts:
    """The list of an operator.

    Raises:
        ValueError: an entry is malformed.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._rules = [HostRule.of(entry) for entry in entries]

    def allows(self, host: str, port: int) -> bool:
        """Return whether the list names a host; `host` is in lower case, and in ASCII as DNS knows it."""
        return any(rule.matches(host, port) for rule in self._rules)

    def allows_address(self, host: str, port: int, address: IpAddress) -> bool:
        """Return whether a listed host may have this address.

        Public addresses always. A private address only if the host is listed by name. Loopback only for
        `localhost` listed by name. Any other address (link-local, multicast, reserved) only if it is listed
        itself.
        """
        if is_public(address):
            return True
        if not any(rule.host and rule.matches(host, port) for rule in self._rules):
            return False
        if _as_address(host) is not None:
            return True  # the entry is the address itself
        inner = embedded(address)
        if inner.is_loopback:
            return host in _LOCAL_NAMES or host.endswith(".localhost")
        return is_private_network(inner)


def embedded(address: IpAddress) -> IpAddress:
    """Return the IPv4 address inside of an IPv6 one, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _TRANSLATED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: IpAddress) -> bool:
    """Return whether an address, or the IPv4 address inside of it, is of the public internet."""
    inner = embedded(address)
    if isinstance(inner, IPv6Address) and inner.is_site_local:  # deprecated, but some networks route it
        return False
    return inner.is_global and not (inner.is_multicast or inner.is_reserved or inner.is_unspecified)


def is_private_network(address: IpAddress) -> bool:
    """Return whether an address is of a local network (RFC 1918, RFC 4193)."""
    return any(address in network for network in _PRIVATE if network.version == address.version)


_PRIVATE: Final = tuple(
    ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)


def _as_address(host: str) -> IpAddress | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
