"""How often one client may ask: so many requests in any minute, by key, or by address where there are none.

Behind a proxy all clients have one address, the proxy's: give them keys, or let the proxy limit them.
Counted is what was let in, by this gateway; each has its own count. Who has not asked for a minute is
forgotten: addresses are many, and the library would keep an entry of each for ever.
"""

import math
import time
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.middleware.paths import is_watching
from shared.errors import CapacityError

HEADERS: Final = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset")


class TooOftenError(CapacityError):
    """This client has asked as often as it may in a minute."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, limit: int, who: str, retry_s: int) -> None:
        super().__init__(f"{who} may ask {limit} times a minute, and has; try again in {retry_s} s")


class RateLimit:
    """ASGI middleware: who asks too often is told when to come again."""

    def __init__(self, app: ASGIApp, *, per_minute: int) -> None:
        self._app = app
        self._limit = RateLimitItemPerMinute(per_minute)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._asked_s: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_watching(scope["path"]):
            await self._app(scope, receive, send)
            return
        kind, who = _who(scope)
        is_let_in = self._limiter.hit(self._limit, kind, who)
        self._remember(kind, who)
        stats = self._limiter.get_window_stats(self._limit, kind, who)
        reset_s = max(1, math.ceil(stats.reset_time - time.time()))
        told = dict(zip(HEADERS, map(str, (self._limit.amount, stats.remaining, reset_s)), strict=True))
        if not is_let_in:
            whose = "this key" if kind == "key" else "this address"
            error = errors.of_exception(TooOftenError(self._limit.amount, whose, reset_s))
            await errors.send(send, error, told | {"retry-after": str(reset_s)})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(told)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _remember(self, kind: str, who: str) -> None:
        """Note who asked last, and forget whose window is over."""
        now_s = time.time()
        self._asked_s[kind, who] = now_s
        self._asked_s.move_to_end((kind, who))
        while (oldest := next(iter(self._asked_s.items())))[1] < now_s - self._limit.get_expiry():
            del self._asked_s[oldest[0]]
            self._limiter.clear(self._limit, *oldest[0])


def _who(scope: Scope) -> tuple[str, str]:
    """Whose count it is."""
    key = scope.get("state", {}).get("key")
    if key is not None:
        return "key", key
    client = scope.get("client")
    return "address", _network(client[0]) if client else "unknown"


def _network(host: str) -> str:
    """Whose address it is: of IPv6 everybody has 2**64, which are one.

    A socket that listens on both calls an IPv4 address `::ffff:10.0.0.7`.
    """
    if ":" not in host:
        return host
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, 64), strict=False))
