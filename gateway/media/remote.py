"""Loading media from `http(s)` addresses that an operator allows (`gateway.media.allowed_hosts`).

The host is resolved here, its addresses are checked, and the connection goes to a checked address: a second
DNS answer cannot redirect it. Redirects are followed on the same host only, and each is checked again.
Proxies of the environment are not used, because they would resolve the host themselves.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cache
from ipaddress import ip_address
from typing import Final

import httpx

from configs.deployment import MediaSettings
from gateway.errors import InvalidParamError
from gateway.media.allowed_hosts import AllowedHosts, IpAddress
from gateway.media.sources import RemoteSource
from gateway.media.spool import Spool, SpoolLimitError, of_chunks
from shared.validation_errors import described

Resolve = Callable[[str, int], Awaitable[Sequence[IpAddress]]]

_REDIRECTS: Final = 5
_HEADERS: Final = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "dalsegno"}
_NOT_LOADED: Final = "media_not_loaded"


class RemoteMedia:
    """Loads media from allowed hosts. `resolve` finds the addresses of a host."""

    def __init__(self, settings: MediaSettings, resolve: Resolve | None = None) -> None:
        self._hosts = AllowedHosts(settings.allowed_hosts)
        self._timeout_s = settings.fetch_timeout_s
        self._max_bytes = settings.max_bytes
        self._resolve = resolve or _addresses_of

    def check(self, source: RemoteSource) -> None:
        """Refuse an address that cannot be loaded, before anything is resolved.

        Raises:
            InvalidParamError: the address is malformed, or its host is not allowed.
        """
        self._checked(source.where, source.url)

    async def load(self, source: RemoteSource) -> Spool:
        """Load a medium.

        Raises:
            InvalidParamError: the address is not allowed, or the medium cannot be loaded, in time, and in
                its size limit.
        """
        where = source.where
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._load(where, self._checked(where, source.url))
        except TimeoutError as error:
            raise _failure(where, f"its host did not send it within {self._timeout_s:g} s") from error
        except SpoolLimitError as error:
            raise _too_large(where, self._max_bytes) from error
        except httpx.HTTPError as error:
            raise _failure(where, f"its host did not answer ({type(error).__name__})") from error

    async def _load(self, where: str, url: httpx.URL) -> Spool:
        for _ in range(_REDIRECTS):
            address = await self._address(where, url)
            async with (
                httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=self._timeout_s) as client,
                client.stream(
                    "GET",
                    url.copy_with(host=str(address)),
                    headers={**_HEADERS, "host": url.netloc.decode("ascii")},
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                ) as response,
            ):
                if not response.has_redirect_location:
                    return await self._body(where, response)
                target = url.join(response.headers["location"])
            if (target.host, target.scheme, target.port) != (url.host, url.scheme, url.port):
                raise _failure(where, "its host redirects to another host, which is not followed")
            url = self._checked(where, str(target))
        raise _failure(where, f"its host redirects more than {_REDIRECTS} times")

    async def _body(self, where: str, response: httpx.Response) -> Spool:
        if response.status_code != httpx.codes.OK:
            raise _failure(where, f"its host answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _failure(where, "its host compressed it, which is not accepted")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise SpoolLimitError
        async with aclosing(_raw(response)) as chunks:
            return await of_chunks(chunks, self._max_bytes)

    def _checked(self, where: str, text: str) -> httpx.URL:
        try:
            url = httpx.URL(text)
            host, port = _host(url), url.port or _PORTS[url.scheme]
        except (httpx.InvalidURL, KeyError, ValueError) as error:
            raise InvalidParamError(
                where, f"{where}: expected an http(s) address, found {text[:80]!r}"
            ) from error
        if not host or url.userinfo or not 0 < port < 65536:
            raise InvalidParamError(
                where, f"{where}: expected an http(s) address without a user, found {described(text[:80])}"
            )
        if not self._hosts.allows(host, port):
            raise InvalidParamError(
                where,
                f"{where}: this gateway does not load media from {host[:200]!r}; send the bytes (as a data "
                "URL, a form, or with POST /v1/files), or ask the operator to list the host in "
                "media.allowed_hosts",
                code="media_host_not_allowed",
            )
        return url.copy_with(fragment=None)

    async def _address(self, where: str, url: httpx.URL) -> IpAddress:
        """The address to connect to: all addresses of the host must be allowed."""
        host, port = _host(url), url.port or _PORTS[url.scheme]
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            raise _failure(where, f"the host {host[:200]!r} has no address") from error
        if not found or not all(self._hosts.allows_address(host, port, address) for address in found):
            raise InvalidParamError(
                where,
                f"{where}: the host {host[:200]!r} has an address that is private or reserved, which "
                "media.allowed_hosts does not allow for it",
                code="media_host_not_allowed",
            )
        return found[0]


_PORTS: Final = {"http": 80, "https": 443}


def _host(url: httpx.URL) -> str:
    """The host as DNS knows it, in ASCII: the resolver, TLS and the list must mean the same one."""
    return url.raw_host.decode("ascii").rstrip(".")


async def _raw(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    async for chunk in response.aiter_raw(1 << 16):
        yield chunk


async def _addresses_of(host: str, port: int) -> list[IpAddress]:
    """The addresses of a host, by the machine's resolver, the preferred one first."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _failure(where: str, why: str) -> InvalidParamError:
    return InvalidParamError(where, f"{where}: the medium could not be loaded: {why}", code=_NOT_LOADED)


def _too_large(where: str, max_bytes: int) -> InvalidParamError:
    return InvalidParamError(
        where,
        f"{where}: expected at most {max_bytes} bytes (media.max_bytes)",
        code="media_too_large",
        status=413,
    )
