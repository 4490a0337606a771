"""Request ids: chosen by a client or generated here, recently seen, or older than the log.

The log forgets its oldest records. A request that it has forgotten is answered with "gone" (410) and not with
"unknown" (404) as far as that can be known: a generated id contains the time of its request, and `RecentIds`
holds the ids for which this gateway has recently read a conductor's decision.
"""

import re
import secrets
import time
from typing import Final

from shared.ids import RequestId, parse_request_id
from shared.log.port import LogState

_GENERATED: Final = re.compile(
    r"(?:chatcmpl|cmpl|embd|gen|img|msg|ollama|resp|speech|tok|video|warm)-([0-9a-f]{8})-[0-9a-f]{16}(?:-[0-9]{1,4})?"
)
"""An id made by `request_id_of`, or that of a further choice of such a request."""
MOST: Final = 100_000
"""The number of recent ids, in some 15 MB."""


def request_id_of(chosen: str | None, prefix: str) -> RequestId:
    """The id that the client chose, or a unique one, which contains the time in seconds.

    Raises:
        ClientError: the chosen id is not valid.
    """
    if chosen is not None:
        return parse_request_id(chosen)
    return RequestId(f"{prefix}-{int(time.time()):08x}-{secrets.token_hex(8)}")


def is_generated(request_id: str) -> bool:
    """True for an id that a gateway generated."""
    return _GENERATED.fullmatch(request_id) is not None


def is_forgotten(request_id: str, log: LogState) -> bool:
    """True if a gateway generated this id before the log's oldest record was stored."""
    generated = _GENERATED.fullmatch(request_id)
    if generated is None:
        return False
    return int(generated[1], 16) * 10**9 < log.first_ns if log.messages else log.last_seq > 0


class RecentIds:
    """The ids of the last `MOST` requests, of all gateways, for which a conductor's decision was read."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, request_id: str) -> None:
        """Add a request for which a decision was read."""
        self._ids[request_id] = None
        if len(self._ids) > MOST:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
