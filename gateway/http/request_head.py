"""Checks of a request's head that the parser leaves to the server: version, `Host`, transfer coding."""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from shared.errors import ClientError

HOST: Final = b"host"
_VERSIONS: Final = ("1.0", "1.1")
_AUTHORITY: Final = re.compile(rb"[\x21\x24-\x2e\x30-\x3b\x3d\x41-\x5b\x5d\x5f\x61-\x7a\x7e]*")
"""The characters of a host and a port: neither `/`, `?`, `#`, `@` nor space."""


class NotHttpError(ClientError):
    """The received bytes are not an HTTP request."""

    code = "invalid_http"


class HttpVersionError(ClientError):
    """The request has another version of HTTP."""

    code = "http_version_not_supported"
    status = 505


class TransferCodingError(ClientError):
    """The body has a transfer coding that this server does not decode."""

    code = "transfer_coding_not_supported"
    status = 501


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check a request's version and its headers, with lower-case names (RFC 9112, 2.3, 3.2 and 6.1).

    Raises:
        NotHttpError: the `Host` is missing, repeated or malformed; or HTTP/1.0 with a transfer coding.
        HttpVersionError: the version is neither 1.0 nor 1.1.
        TransferCodingError: the transfer coding is another one than `chunked`.
    """
    if version not in _VERSIONS:
        raise HttpVersionError(f"expected HTTP/1.1 or HTTP/1.0, found HTTP/{version}")
    hosts, codings = [], []
    for name, value in headers:
        if name == HOST:
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    _check_hosts(version, hosts)
    if codings:
        _check_codings(version, codings)


def origin_form(target: bytes) -> tuple[bytes, bytes | None]:
    """The path and query of a request's target, and its host if the target is a whole URL.

    A client sends a whole URL if it takes this server for a proxy; its host then replaces `Host` (RFC 9112,
    3.2.2).
    """
    if not target.lower().startswith((b"http://", b"https://")):
        return target, None
    found = urlsplit(target)
    return (found.path or b"/") + (b"?" + found.query if found.query else b""), found.netloc


def _check_hosts(version: str, hosts: list[bytes]) -> None:
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise NotHttpError(f"expected one Host header, found {len(hosts) or 'none'}")
    if hosts and not _AUTHORITY.fullmatch(hosts[0]):
        raise NotHttpError("Host: expected a name or an address, and maybe a port; found other characters")


def _check_codings(version: str, codings: list[bytes]) -> None:
    if version == "1.0":
        raise NotHttpError("Transfer-Encoding: expected none in HTTP/1.0; send a Content-Length")
    found = b",".join(codings).strip().lower()
    if found != b"chunked":
        raise TransferCodingError(
            f"Transfer-Encoding: expected chunked alone, found {found[:80].decode('latin-1')!r}"
        )
