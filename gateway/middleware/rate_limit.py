"""Middleware that limits requests per minute and client: by API key, or by address without keys.

Behind a proxy all clients have the proxy's address: use keys, or limit in the proxy. Only admitted requests
count. Each gateway counts for itself. Clients without a request in the last minute are removed: addresses
are many, and the library would keep an entry for each.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.client_key import key_name
from gateway.errors import ErrorResponse
from gateway.middleware.exchange import Exchange, Middleware
from gateway.middleware.paths import is_monitoring
from shared.errors import CapacityError

HEADERS: Final = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")


class RateLimitExceededError(CapacityError):
    """This client has sent its maximum number of requests in a minute."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, limit: int, client: str, retry_s: int) -> None:
        super().__init__(
            f"{client} may send {limit} requests a minute, and has sent them; try again in {retry_s} s"
        )


class RateLimit(Middleware):
    """Refuses requests above the limit, with the time after which to retry."""

    def __init__(self, app: ASGIApp, *, per_minute: int) -> None:
        super().__init__(app)
        self._limit = RateLimitItemPerMinute(per_minute)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._last_request_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if is_monitoring(scope["path"]):
            return self._next(exchange, scope, receive, send)
        kind, client = _client_of(scope)
        is_admitted = self._limiter.hit(self._limit, kind, client)
        self._remember(kind, client)
        stats = self._limiter.get_window_stats(self._limit, kind, client)
        reset_s = max(1, math.ceil(stats.reset_time - time.time()))
        fields = dict(zip(HEADERS, map(str, (self._limit.amount, stats.remaining, reset_s)), strict=True))
        if not is_admitted:
            which = "this key" if kind == "key" else "this address"
            error = errors.of_exception(RateLimitExceededError(self._limit.amount, which, reset_s))
            return ErrorResponse(error, fields | {"retry-after": str(reset_s)})(scope, receive, send)

        def add_headers(message: Message) -> None:
            MutableHeaders(scope=message).update(fields)

        exchange.on_head(add_headers)
        return self._next(exchange, scope, receive, send)

    def _remember(self, kind: str, client: str) -> None:
        """Note a client's request, and remove clients whose window is over."""
        now_s = time.time()
        self._last_request_s[kind, client] = now_s
        self._last_request_s.move_to_end((kind, client))
        while (oldest := next(iter(self._last_request_s.items())))[1] < now_s - self._limit.get_expiry():
            del self._last_request_s[oldest[0]]
            self._limiter.clear(self._limit, *oldest[0])


def _client_of(scope: Scope) -> tuple[str, str]:
    """The client whose count a request belongs to: the kind of its name, and the name."""
    key = key_name(scope)
    if key is not None:
        return "key", key
    client = scope.get("client")
    return "address", _network(client[0]) if client else "unknown"


def _network(host: str) -> str:
    """The network that one client has: an IPv4 address, or a /64 of IPv6.

    A socket that listens on both protocols reports an IPv4 address as `::ffff:10.0.0.7`.
    """
    if ":" not in host:
        return host
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, 64), strict=False))
